"""Multi-GPU kernels for JAX that overlap communication with arithmetic.

Names are imported when first used: the command line and the processes that watch over a job
import this package too, and do without JAX.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stretto.kernels.all_gather_matmul import all_gather_matmul
    from stretto.kernels.matmul_reduce_scatter import matmul_reduce_scatter
    from stretto.launch.startup import initialize

__version__ = "0.1.0"

__all__ = ["all_gather_matmul", "initialize", "matmul_reduce_scatter"]

# Public name: the module it lives in.
_MODULES = {
    "all_gather_matmul": "stretto.kernels.all_gather_matmul",
    "initialize": "stretto.launch.startup",
    "matmul_reduce_scatter": "stretto.kernels.matmul_reduce_scatter",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
