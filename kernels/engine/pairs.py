"""Tiles of two right-hand sides, side by side in one stage: half the columns are of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jax.experimental import pallas as pl

from stretto.distributed.schedule import Int
from stretto.kernels.engine import stages
from stretto.kernels.engine.parts import Ref, Stream, Tile
from stretto.kernels.engine.tiles import TileShape

SWIZZLED_ROWS = 8  # of a swizzled tile, contiguous in memory


def halved(shape: Any) -> Any:
    """Tiles of half the columns: of either right-hand side, and of the result of both."""
    return dataclasses.replace(shape, tile_n=shape.tile_n // 2)


def copies_of_pair(shape: TileShape, transposed: bool) -> int:
    """Copies that fill a stage with tiles of two right-hand sides."""
    return 2 if transposed else 2 * (shape.tile_k // SWIZZLED_ROWS)


def pair_along_n(
    refs: Sequence[Ref], shape: TileShape, transposed: bool, window: Callable[[Int, Int], tuple]
) -> Stream:
    """Two right-hand sides; half the columns of a stage belong to each.

    `window` is (tile along the contraction, column of tiles of `halved(shape)`) -> the window in
    either right-hand side. A copy fills contiguous memory. In a swizzled tile `[tile_k, tile_n]`
    only 8 rows are contiguous, so half its columns take a copy for each 8 rows. A stage with edges
    is in columns of tiles (`shared_memory.with_edges`), unless it is transposed.
    """

    def load(tile: Tile, k: Int, stage: Ref, barrier: Ref) -> None:
        fill([ref.at[window(k, tile.n)] for ref in refs], shape, stage, barrier, transposed)

    return Stream(load=load)


def fill(
    windows: Sequence[Ref], shape: TileShape, stage: Ref, barrier: Ref, transposed: bool = False
) -> None:
    """Starts the copies of a window of either right-hand side into its half of a stage."""
    columns = halved(shape).tile_n
    for index, half in enumerate(windows):
        own = pl.ds(index * columns, columns)
        if transposed:
            stages.copy(half, stage.at[own], barrier)
        elif len(stage.shape) > len(half.shape):
            across = stage.shape[0] // len(windows)
            stages.fill(half, stage.at[pl.ds(index * across, across)], barrier)
        else:
            for row in range(0, shape.tile_k, SWIZZLED_ROWS):
                rows = pl.ds(row, SWIZZLED_ROWS)
                stages.copy(half.at[rows], stage.at[rows, own], barrier)
