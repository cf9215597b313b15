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


def with_edges(shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> Any:
    """The same, `[..., rows, columns]`, for arrays that are not made of whole 8 x 64 tiles.

    As (what warps and tensor cores use, what is copied). The latter are rows of 128 bytes, which
    the copy engine fills from rows of the array; it cuts off any number of them, and of columns,
    and fills up with zeros. With more columns than a row has, both are columns of tiles,
    `[..., columns / 64, rows, 64]`, each of which one copy fills.
    """
    in_tiles, row = swizzled(dtype), row_elements(dtype)
    *before, rows, columns = shape
    if columns != row:
        shape = (*before, columns // row, rows, row)
    return plgpu.RefUnion(
        plgpu.SMEM(shape, dtype, transforms=in_tiles),
        plgpu.SMEM(shape, dtype, transforms=in_tiles[1:]),
    )
