"""Streams of operands in this device's memory, one matrix or several side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stretto.distributed.schedule import Int
from stretto.kernels.engine import stages
from stretto.kernels.engine.parts import Ref, Stream, Tile
from stretto.kernels.engine.segments import Segments


def of(ref: Ref, window: Callable[[Tile, Int], tuple]) -> Stream:
    """One matrix; `window` is (tile, tile along the contraction) -> its place in the matrix."""
    return along_k([ref], Segments((1,)), window)


def along_k(
    refs: Sequence[Ref], segments: Segments, window: Callable[[Tile, Int], tuple]
) -> Stream:
    """Matrices that follow each other along the contraction, in `segments`.

    `window` is (tile, tile along the contraction of one matrix) -> its place in that matrix.
    """

    def load(tile: Tile, k: Int, stage: Ref, barrier: Ref) -> None:
        segments.visit(
            k,
            lambda index, within: stages.fill(refs[index].at[window(tile, within)], stage, barrier),
        )

    return Stream(load=load)


def along_n(refs: Sequence[Ref], segments: Segments, window: Callable[[Int, Int], tuple]) -> Stream:
    """Right-hand sides side by side, in `segments` of columns of tiles.

    `window` is (tile along the contraction, column of tiles of one matrix) -> its place in it.
    """

    def load(tile: Tile, k: Int, stage: Ref, barrier: Ref) -> None:
        segments.visit(
            tile.n,
            lambda index, within: stages.fill(refs[index].at[window(k, within)], stage, barrier),
        )

    return Stream(load=load)
