"""Tiles of a matrix product as windows of its operands and of its result."""

from __future__ import annotations

from typing import Protocol

from jax.experimental import pallas as pl

from stretto.distributed.schedule import Int

type Window = tuple[pl.Slice, pl.Slice]


class TileShape(Protocol):
    """The fields of every configuration of a main loop: a tile, in elements, and its blocks."""

    @property
    def blocks(self) -> int:
        """Blocks of a cluster that compute a tile together, an equal part of the rows each."""
        ...

    @property
    def takes_edges(self) -> bool:
        """Whether its main loop takes matrices that are not made of whole 8 x 64 tiles."""
        ...

    @property
    def tile_m(self) -> int:
        """Rows of lhs and of the result."""
        ...

    @property
    def tile_n(self) -> int:
        """Columns of rhs and of the result."""
        ...

    @property
    def tile_k(self) -> int:
        """Of the contraction, loaded at once."""
        ...

    @property
    def raster_width(self) -> int:
        """Tiles down a band of the raster (`orders.raster`)."""
        ...

    def check(self) -> None:
        """Raises ValueError for a tile that the hardware cannot take."""
        ...


def lhs_window(shape: TileShape, m: Int, k: Int) -> Window:
    """The window of lhs with the tile at row `m` and column `k` of tiles."""
    return pl.ds(m * shape.tile_m, shape.tile_m), pl.ds(k * shape.tile_k, shape.tile_k)


def rhs_window(shape: TileShape, k: Int, n: Int, transposed: bool = False) -> Window:
    """The window of rhs, `[k, n]` or `transposed`, with the tile at row `k` and column `n`."""
    rows = pl.ds(k * shape.tile_k, shape.tile_k)
    columns = pl.ds(n * shape.tile_n, shape.tile_n)
    return (columns, rows) if transposed else (rows, columns)


def piece_window(
    shape: TileShape, m: Int, n: Int, row: Int, rows: Int, column: Int, columns: Int
) -> Window:
    """The window of the result with a piece, `row` and `column` within the tile at (`m`, `n`)."""
    first_row, first_column = m * shape.tile_m + row, n * shape.tile_n + column
    return pl.ds(first_row, rows), pl.ds(first_column, columns)
