"""Multi-GPU kernels for JAX that overlap communication with arithmetic."""

from stretto.kernels.all_gather_matmul import all_gather_matmul
from stretto.kernels.matmul_reduce_scatter import matmul_reduce_scatter

__version__ = "0.1.0"

__all__ = ["all_gather_matmul", "matmul_reduce_scatter"]
