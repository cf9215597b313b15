"""Scalars that a single warp reads from shared memory.

Mosaic GPU has a rule for such a load, as for the store, which is the same for every thread. It
marks only the store's as one for warps. Private JAX, checked on 0.11.2 and 0.12.0.1.
"""

from __future__ import annotations

from jax._src.lib.mlir.dialects import memref
from jax.experimental.mosaic.gpu import dialect_lowering


def allow_scalar_loads() -> None:
    """Has Mosaic GPU lower them."""
    dialect_lowering._supported_warp_lowerings.add(memref.LoadOp.OPERATION_NAME)
