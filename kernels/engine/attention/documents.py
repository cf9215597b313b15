"""Documents that are packed into one sequence: a query sees the keys of its own document only.

The kernel masks by the numbers of documents. Which blocks of keys a tile of queries has to load,
and which of these need no mask, XLA finds before the kernel, by the least and the highest number in
each: documents that lie in order take few blocks. Numbers in any order are right, and take more.

| entry of the table | meaning |
|---|---|
| `FIRST`, `LAST` | the blocks of a segment that a tile goes through; LAST is the one after them |
| `PLAIN_FIRST`, `PLAIN_LAST` | those among them whose keys are all of the one document of all its queries |
| `COUNT` | the blocks of all segments, at least one: a tile without any goes through the first block |
"""  # noqa: E501

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed.schedule import Int, div
from stretto.kernels.engine.attention.visible import VisibleKeys
from stretto.kernels.engine.parts import Ref, Tile

FIRST, LAST, PLAIN_FIRST, PLAIN_LAST, COUNT = FIELDS = range(5)


def table(queries: jax.Array, keys: jax.Array, visible: VisibleKeys) -> jax.Array:
    """What the kernel reads of tiles and segments.

    Returns:
      int32 `[batch * chunks, tiles, segments, FIELDS]`.

    Args:
      queries: int32 `[batch * chunks, queries]`, the documents of this device's queries.
      keys: int32 `[batch, segments * keys]`, of all devices' keys, in the order of the segments.
      visible: which keys the mask leaves of a sequence that is one document.
    """
    chunks, blocks = visible.chunks, visible.blocks_of_chunk
    batch = keys.shape[0]
    missing = visible.tiles_of_chunk * visible.rows - visible.queries
    of_tiles = jnp.pad(queries, ((0, 0), (0, missing)), mode="edge")
    of_tiles = of_tiles.reshape(batch, chunks, visible.tiles_of_chunk, 1, 1, visible.rows)
    of_blocks = keys.reshape(batch, 1, 1, visible.segments, blocks, visible.block)
    first, last, plain_first, plain_last = ranges(of_tiles, of_blocks, _by_place(visible))
    count = (last - first).sum(-1, keepdims=True)
    is_first = (count == 0) & (jnp.arange(visible.segments) == 0)
    last = jnp.where(is_first, 1, last)
    count = jnp.broadcast_to(jnp.maximum(count, 1), first.shape)
    found = jnp.stack([first, last, plain_first, plain_last, count], -1).astype(jnp.int32)
    return found.reshape(batch * chunks, *found.shape[2:])


def ranges(tiles: jax.Array, blocks: jax.Array, by_place: jax.Array) -> tuple[jax.Array, ...]:
    """(`FIRST`, `LAST`, `PLAIN_FIRST`, `PLAIN_LAST`) of places along the last axis.

    Args:
      tiles, blocks: documents of the tokens of tiles of queries, and of blocks of keys, along their
        last axis; over the other ones every tile meets every block.
      by_place: bool, of the shape of these: what the mask leaves of a single document.
    """
    (t_least, t_most), (b_least, b_most) = ((x.min(-1), x.max(-1)) for x in (tiles, blocks))
    seen = (t_least <= b_most) & (b_least <= t_most) & by_place
    plain = seen & (t_least == t_most) & (b_least == b_most)
    plain_first, plain_last = _hull(plain)
    # Places with other documents between them are masked, and so are all of such a range.
    is_whole = plain_last - plain_first == plain.sum(-1)
    return *_hull(seen), *(jnp.where(is_whole, x, 0) for x in (plain_first, plain_last))


def most_work_first(table: jax.Array) -> jax.Array:
    """The places of tiles, int32 `[batch * chunks * tiles]`, those with most blocks first."""
    work = table[:, :, 0, COUNT].reshape(-1)
    return jnp.argsort(-work).astype(jnp.int32)


def _by_place(visible: VisibleKeys) -> jax.Array:
    """bool `[chunks, tiles, segments, blocks]`: what the mask leaves of a single document."""
    tiles = jnp.arange(visible.tiles_of_chunk, dtype=jnp.int32)[:, None]
    place = jnp.arange(visible.blocks_of_chunk, dtype=jnp.int32)

    def of(chunk: int, segment: int) -> jax.Array:
        first, last = visible.blocks(visible.first_query(chunk, tiles), segment)
        return jnp.broadcast_to((first <= place) & (place < last), (len(tiles), len(place)))

    each = [
        [of(chunk, segment) for segment in range(visible.segments)]
        for chunk in range(visible.chunks)
    ]
    return jnp.stack([jnp.stack(of_chunk, 1) for of_chunk in each])


def _hull(found: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(the first place that holds, one after the last), along the last axis; 0 and 0 of none."""
    count = found.shape[-1]
    place = jnp.arange(count, dtype=jnp.int32)
    last = jnp.max(jnp.where(found, place + 1, 0), -1)
    first = jnp.min(jnp.where(found, place, count), -1)
    return jnp.minimum(first, last), last


@dataclasses.dataclass(frozen=True, kw_only=True)
class Documents:
    """The documents inside the kernel.

    Attributes:
      visible: the sizes of chunks, tiles and blocks.
      table: what the function of this name made.
      queries, keys: as that function takes them.
    """

    visible: VisibleKeys
    table: Ref
    queries: Ref
    keys: Ref

    def blocks(self, tile: Tile, segment: Int) -> tuple[Int, Int]:
        """(first block of a segment that a tile goes through, the one after the last)."""
        return self._entry(tile, segment, FIRST), self._entry(tile, segment, LAST)

    def plain_blocks(self, tile: Tile, segment: Int) -> tuple[Int, Int]:
        """Those among them that need no mask of documents."""
        return self._entry(tile, segment, PLAIN_FIRST), self._entry(tile, segment, PLAIN_LAST)

    def count(self, tile: Tile) -> Int:
        """How many blocks a tile goes through, in all."""
        return self._entry(tile, 0, COUNT)

    def masked(self, scores: jax.Array, tile: Tile, row: Int, place: Int) -> jax.Array:
        """Scores of a block with minus infinity where query and key are of different documents.

        Args:
          scores: `[rows, keys]` of the tile's queries from `row` on.
          place: the number of the block, `segment * blocks_of_chunk + block`.
        """
        rows, columns = scores.shape
        visible = self.visible
        # Rows behind the chunk's end are its last ones again, as their queries are.
        first = jnp.minimum(tile.m * visible.rows + row, visible.queries - rows)
        batch = div(tile.step, visible.chunks)
        of_rows = self.queries.at[tile.step, pl.ds(first, rows)]
        of_columns = self.keys.at[batch, pl.ds(place * visible.block, columns)]
        return alike(scores, of_rows, of_columns)

    def _entry(self, tile: Tile, segment: Int, field: int) -> Int:
        return self.table[tile.step, tile.m, segment, field]


def alike(scores: jax.Array, of_rows: Ref, of_columns: Ref) -> jax.Array:
    """Scores with minus infinity where the documents of a row and a column differ."""
    layout = plgpu.Layout.WGMMA
    rows = plgpu.load(of_rows, layout=layout.reduce(1), optimized=False)
    columns = plgpu.load(of_columns, layout=layout.reduce(0), optimized=False)
    over = lambda x, axis: lax.broadcast_in_dim(x, scores.shape, (axis,))  # noqa: E731
    return jnp.where(over(rows, 0) == over(columns, 1), scores, -jnp.inf)
