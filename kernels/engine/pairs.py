"""Tiles of two right-hand sides, side by side in one stage: half the columns are of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed.schedule import Int
from stretto.kernels.engine.parts import Ref, Stream, Tile
from stretto.kernels.engine.tiles import TileShape, rhs_window

SWIZZLED_ROWS = 8  # of a swizzled tile that lie together in memory


def halved(shape: Any) -> Any:
    """Tiles of half the columns: those of either of the two, and of what is made of both."""
    return dataclasses.replace(shape, tile_n=shape.tile_n // 2)


def copies_of_pair(shape: TileShape, transposed: bool) -> int:
    """Copies that fill a stage with tiles of two right-hand sides."""
    return 2 if transposed else 2 * (shape.tile_k // SWIZZLED_ROWS)


def pair_along_n(
    refs: Sequence[Ref], shape: TileShape, transposed: bool, rhs_k: Callable[[Int], Int]
) -> Stream:
    """Two right-hand sides, of each of which a stage has half its columns.

    A copy fills memory that is contiguous. Of a swizzled tile `[tile_k, tile_n]` that are 8 rows,
    so half the columns of it take a copy for each 8 rows.
    """
    half = halved(shape)
    step = half.tile_n if transposed else SWIZZLED_ROWS

    def load(tile: Tile, k: Int, stage: Ref, barrier: Ref) -> None:
        for index, ref in enumerate(refs):
            window = ref.at[rhs_window(half, rhs_k(k), tile.n, transposed)]
            if transposed:
                target = stage.at[pl.ds(index * half.tile_n, half.tile_n)]
                plgpu.copy_gmem_to_smem(window, target, barrier)
                continue
            columns = pl.ds(index * half.tile_n, half.tile_n)
            for row in range(0, shape.tile_k, step):
                rows = pl.ds(row, step)
                plgpu.copy_gmem_to_smem(window.at[rows], stage.at[rows, columns], barrier)

    return Stream(load=load)
