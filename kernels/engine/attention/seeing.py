"""Which tiles of queries see a block of keys: the inverse of `visible`, for derivatives of keys.

A call has the keys of one device, which may be another one than that of the queries. `before` is
the order in which blocks of keys take turns, where they do.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax

from stretto.distributed.schedule import Int, div, where
from stretto.kernels.engine.attention.visible import VisibleKeys, clipped


class Range(NamedTuple):
    """Tiles of queries that a block of keys goes through, and those that need no mask of documents.

    Attributes:
      first, last: the first one, and the one after the last; equal if there is none.
      plain_first, plain_last: likewise; None where all tokens are of one document.
    """

    first: Int
    last: Int
    plain_first: Int | None = None
    plain_last: Int | None = None

    def is_plain(self, tile: Int) -> Int | None:
        """Whether a tile of the range needs no mask of documents; None where none does."""
        if self.plain_first is None or self.plain_last is None:
            return None
        return (self.plain_first <= tile) & (tile < self.plain_last)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seeing:
    """The queries of one device that see the keys of another one, or of itself.

    Attributes:
      visible: which keys a tile of queries sees; `rows` divides `queries`.
      distance: how many places further on the ring the device is that has the keys.
    """

    visible: VisibleKeys
    distance: int = 0

    def of_device(self, device: Int) -> Seeing:
        """The same for the queries of another device."""
        return dataclasses.replace(self, visible=dataclasses.replace(self.visible, device=device))

    def segment(self, chunk: Int) -> Int:
        """The number of a chunk of these keys among the segments of `visible`."""
        return self.distance * self.visible.chunks + chunk

    def first_key(self, chunk: Int, block: Int) -> Int:
        """The place in the sequence of the first key of a block."""
        return self.visible.first_key(self.segment(chunk)) + block * self.visible.block

    def tiles(self, first_key: Int, chunk: Int) -> tuple[Int, Int]:
        """(first tile of a chunk of queries that sees a block of keys, the one after the last)."""
        visible = self.visible
        count = visible.queries // visible.rows
        if not visible.causal:
            return 0, count
        ahead = first_key - visible.first_query(chunk, 0)
        begin = div(clipped(ahead, visible.queries), visible.rows)
        if visible.window is None:
            return begin, count
        end = clipped(ahead + visible.block - 1 + visible.window, visible.queries)
        return begin, div(end + visible.rows - 1, visible.rows)

    def count(self, chunk: Int, block: Int) -> Int:
        """How many tiles of queries see a block of keys in all."""
        first_key = self.first_key(chunk, block)
        ranges = [self.tiles(first_key, own) for own in range(self.visible.chunks)]
        return sum((last - first for first, last in ranges), 0)

    def before(self, first_query: Int, chunk: Int, block: Int) -> Int:
        """How many blocks of these keys a tile of queries sees before this one."""
        earlier: Int = 0
        for other in range(self.visible.chunks):
            first, last = self.visible.blocks(first_query, self.segment(other))
            of_chunk = clipped(block - first, self.visible.keys)
            earlier += where(chunk > other, last - first, where(chunk == other, of_chunk, 0))
        return earlier

    def is_seen(self, first_query: Int) -> jax.Array | bool:
        """Whether a tile of queries sees any of these keys."""
        found: jax.Array | bool = False
        for chunk in range(self.visible.chunks):
            first, last = self.visible.blocks(first_query, self.segment(chunk))
            found = found | (first < last)
        return found
