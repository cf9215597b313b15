"""Which blocks of keys a tile of queries sees: integer functions, for kernels and for tests.

A sequence is split between devices, each of which holds one stretch of it (a chunk), or two in
zigzag. A tile of queries lies in one chunk of its device. It goes through the chunks of keys of all
devices, its own device's first; a chunk is a *segment* of this walk. Of each it sees a range of
blocks, which may be empty: under a causal mask a chunk is before a tile, behind it, or its own.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from stretto.distributed.schedule import Int, ceil_div, div, rem, where
from stretto.kernels.engine.parts import Tile


@dataclasses.dataclass(frozen=True, kw_only=True)
class VisibleKeys:
    """The keys that the queries of one device see.

    Attributes:
      device: this one, of `devices` that hold the sequence.
      chunks: of a device: 1, or 2 in zigzag.
      queries, keys: in a chunk.
      rows: queries of a tile.
      block: keys of a block; divides `keys`.
      causal: a query sees no key behind itself; chunks then have as many keys as queries.
      window: the most keys that a query sees, itself and those right before it; only with `causal`.
    """

    device: Int
    devices: int
    chunks: int
    queries: int
    keys: int
    rows: int
    block: int
    causal: bool
    window: int | None = None

    @property
    def segments(self) -> int:
        """Chunks of keys of all devices."""
        return self.devices * self.chunks

    @property
    def blocks_of_chunk(self) -> int:
        """Blocks of keys in a chunk."""
        return self.keys // self.block

    @property
    def tiles_of_chunk(self) -> int:
        """Tiles of queries in a chunk; the last one may have fewer rows."""
        return ceil_div(self.queries, self.rows)

    def step(self, segment: Int) -> Int:
        """How many places further on the ring the device is that holds a segment."""
        return div(segment, self.chunks)

    def chunk(self, segment: Int) -> Int:
        """Which of the chunks of that device it is."""
        return segment - self.step(segment) * self.chunks

    def first_query(self, chunk: Int, tile: Int) -> Int:
        """The place in the sequence of the first query of a tile of one of the own chunks."""
        return self._number(self.device, chunk) * self.queries + tile * self.rows

    def query_of(self, tile: Tile) -> Int:
        """The place in the sequence of the first query of a tile."""
        return self.first_query(rem(tile.step, self.chunks), tile.m)

    def first_key(self, segment: Int) -> Int:
        """The place in the sequence of the first key of a segment."""
        holder = rem(self.device + self.step(segment), self.devices)
        return self._number(holder, self.chunk(segment)) * self.keys

    def blocks(self, first_query: Int, segment: Int) -> tuple[Int, Int]:
        """(first block of a segment that a tile sees, the one after the last); equal if it is none.

        The tile begins at `first_query`.
        """
        count = self.blocks_of_chunk
        if not self.causal:
            return 0, count
        first_key = self.first_key(segment)
        # Up to the last query of the tile, or of its chunk, from the window of its first one on.
        left = self.queries - rem(first_query, self.queries)
        end = first_query + _least(self.rows, left) - first_key
        begin = 0 if self.window is None else first_query - self.window + 1 - first_key
        first, last = clipped(begin, self.keys), clipped(end, self.keys)
        return div(first, self.block), div(last + self.block - 1, self.block)

    def count(self, first_query: Int) -> Int:
        """How many blocks a tile sees in all: one at least, that of its own place."""
        ranges = [self.blocks(first_query, segment) for segment in range(self.segments)]
        return sum((last - first for first, last in ranges), 0)

    def is_seen(self, segment: int) -> bool | jax.Array:
        """Whether any query of this device sees a key of a segment."""
        if not self.causal:
            return True
        chunk_wide = dataclasses.replace(self, rows=self.queries)
        found = False
        for chunk in range(self.chunks):
            first, last = chunk_wide.blocks(self.first_query(chunk, 0), segment)
            found = found | (first < last)
        return found

    def needs_mask(self, first_query: Int, rows: int, first_key: Int) -> bool | jax.Array:
        """Whether one of `rows` queries does not see all keys of the block from `first_key` on."""
        if not self.causal:
            return False
        hidden = first_key + self.block - 1 > first_query
        if self.window is None:
            return hidden
        return hidden | (first_query + rows - 1 - first_key >= self.window)

    def _number(self, device: Int, chunk: Int) -> Int:
        """The number of a device's chunk in the sequence."""
        if self.chunks == 1:
            return device
        return where(chunk == 0, device, 2 * self.devices - 1 - device)


@dataclasses.dataclass(frozen=True)
class SeenByPlace:
    """Which blocks of keys a tile goes through where all tokens are of one document."""

    visible: VisibleKeys

    def blocks(self, tile: Tile, segment: Int) -> tuple[Int, Int]:
        """(first block of a segment, the one after the last); equal if there is none."""
        return self.visible.blocks(self.visible.query_of(tile), segment)

    def count(self, tile: Tile) -> Int:
        """How many blocks of all segments, at least one."""
        return self.visible.count(self.visible.query_of(tile))


def _least(x: int, y: Int) -> Int:
    return min(x, y) if isinstance(y, int) else jnp.minimum(x, y)


def clipped(x: Int, most: int) -> Int:
    """`x`, or the nearest number from 0 to `most`."""
    return min(max(x, 0), most) if isinstance(x, int) else jnp.clip(x, 0, most)
