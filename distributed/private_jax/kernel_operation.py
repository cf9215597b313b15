"""The operation that `plgpu.kernel` makes of a kernel in a program, and JAX's rules for it.

Private JAX, checked on 0.11.2 and 0.12.0.1.
"""

from __future__ import annotations

from typing import Any

from jax._src.pallas import mpmd
from jax._src.pallas.mosaic_gpu import core as gpu_core

kernel_p = mpmd.mpmd_map_p


def is_of_gpus(mesh: Any) -> bool:
    """Whether `mesh`, of the operation's, is one of blocks and warpgroups of a GPU."""
    return isinstance(mesh, gpu_core.Mesh)


def lower_for_gpus(ctx: Any, *operands: Any, **params: Any) -> Any:
    """JAX's lowering for GPUs: a kernel of Mosaic GPU."""
    return mpmd._mpmd_map_mgpu_lowering(ctx, *operands, **params)


def lower_elsewhere(ctx: Any, *operands: Any, **params: Any) -> Any:
    """JAX's lowering for other devices: its interpreter."""
    return mpmd._mpmd_map_fallback_lowering(ctx, *operands, **params)
