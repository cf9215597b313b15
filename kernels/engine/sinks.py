"""Sinks that store results in this device's memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed.schedule import Int
from stretto.kernels.engine.parts import Ref, Sink, Tile
from stretto.kernels.engine.segments import Segments
from stretto.kernels.engine.tiles import TileShape, piece_window


def along_n(
    refs: Sequence[Ref],
    segments: Segments,
    shape: TileShape,
    leading: Callable[[Tile], tuple[Int, ...]] = lambda tile: (),
    row: Callable[[Tile], Int] = lambda tile: tile.m,
) -> Sink:
    """Results side by side, in `segments` of columns of tiles.

    `leading` are the indices of a tile's matrix in a result of more than two dimensions, and `row`
    is the row of tiles in that matrix.
    """

    def store(tile: Tile, piece: Ref, first_row: Int, column: Int) -> None:
        rows, columns = piece.shape

        def store_to(index: int, n: Int) -> None:
            window = piece_window(shape, row(tile), n, first_row, rows, column, columns)
            target = refs[index].at[*leading(tile), *window]
            plgpu.copy_smem_to_gmem(piece, target, commit_group=False)

        segments.visit(tile.n, store_to)

    return Sink(store=store)
