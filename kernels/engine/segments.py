"""Several matrices side by side, none of which is copied: which of them a tile belongs to."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from jax.experimental import pallas as pl

from stretto.distributed.schedule import Int, ceil_div


@dataclasses.dataclass(frozen=True)
class Segments:
    """Tiles along one dimension, `counts[i]` of them in matrix `i`, none shared between two."""

    counts: tuple[int, ...]

    @classmethod
    def of(cls, sizes: Sequence[int], tile: int) -> Segments:
        """Matrices of so many elements along the dimension, in tiles of `tile`."""
        return cls(tuple(ceil_div(size, tile) for size in sizes))

    @property
    def total(self) -> int:
        """Tiles of all matrices."""
        return sum(self.counts)

    def visit(self, tile: Int, fun: Callable[[int, Int], None]) -> None:
        """Calls `fun(i, tile within matrix i)` in a kernel, for the matrix that holds `tile`."""
        if len(self.counts) == 1:
            fun(0, tile)
            return
        first = 0
        for index, count in enumerate(self.counts):
            within = (tile >= first) & (tile < first + count)
            pl.when(within)(lambda index=index, first=first: fun(index, tile - first))
            first += count
