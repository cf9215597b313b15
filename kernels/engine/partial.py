"""Pieces of which only some rows are stored: those of a tile at the edge of a group of rows."""

from __future__ import annotations

import jax.numpy as jnp
from jax.experimental import pallas as pl

from stretto.distributed.schedule import Int
from stretto.kernels.engine.parts import Ref, Sink, Tile


def stored_rows(sink: Sink, tile: Tile, row: Int, rows: int) -> tuple[Int, Int]:
    """(first row, row after the last one) that are stored of a piece of `rows` from `row` on."""
    if sink.rows is None:
        return 0, rows
    first, end = (jnp.clip(x - row, 0, rows) for x in sink.rows(tile))
    return first, end


def store(sink: Sink, tile: Tile, whole: Ref, edge: Ref, row: Int, column: Int) -> None:
    """Starts the copies of a piece, or of those of its rows that are stored.

    Args:
      sink: where it goes.
      tile: that it is part of.
      whole, edge: the buffer that holds it, with a swizzle if all of it is stored, else without:
        of a swizzled one the copy engine takes no fewer than 8 rows.
      row, column: its first ones within the tile.
    """
    count = whole.shape[0]
    first, end = stored_rows(sink, tile, row, count)
    rows = end - first

    @pl.when(rows == count)
    def _():
        sink.store(tile, whole, row, column)

    @pl.when(rows < count)
    def _():
        # The engine's copies are of a fixed size: one for each power of two that makes up `rows`.
        start, size = first, count // 2
        while size:
            taken = rows & size

            @pl.when(taken != 0)
            def _(start=start, size=size):
                sink.store(tile, edge.at[pl.ds(start, size)], row + start, column)

            start, size = start + taken, size // 2
