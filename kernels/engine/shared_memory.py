"""Tiles in shared memory, in the layout of NVIDIA's tensor cores and copy engine."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

SWIZZLE_BYTES = 128
ALIGNED_SCALES = 32  # in float32: copies into shared memory begin at multiples of 128 bytes
SMEM_BYTES = 232_448 - 1024
"""Of a block on Hopper and on Blackwell, less what barriers and alignment take."""


def row_elements(dtype: jax.typing.DTypeLike) -> int:
    """Elements in a row of a swizzled tile."""
    return SWIZZLE_BYTES // jnp.dtype(dtype).itemsize


def swizzled(dtype: jax.typing.DTypeLike) -> tuple[Any, ...]:
    """Layout of a tile whose rows are 128 bytes, without bank conflicts."""
    tiling = plgpu.TilingTransform((8, row_elements(dtype)))  # pyright: ignore[reportAbstractUsage]
    swizzle = plgpu.SwizzleTransform(SWIZZLE_BYTES)  # pyright: ignore[reportAbstractUsage]
    return tiling, swizzle
