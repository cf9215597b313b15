"""MLIR's Python bindings, of the dialects that Mosaic GPU and XLA have, as JAX ships them.

JAX makes none of them public. Checked on 0.11.2 and 0.12.0.1.
"""

from __future__ import annotations

from jax._src.lib.mlir.dialects import hlo
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, scf, vector

__all__ = ["arith", "gpu", "hlo", "ir", "llvm", "scf", "vector"]
