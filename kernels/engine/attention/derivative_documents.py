"""Packed documents in attention's derivative: which tiles of queries a block of keys goes through.

The inverse of `documents`, with the same table but for its rows: a block of keys has, for each of
the own chunks of queries, the tiles that hold queries of its documents, and those among them that
need no mask. Without such tiles its derivatives are 0.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from stretto.distributed.schedule import Int, rem
from stretto.kernels.engine.attention import documents
from stretto.kernels.engine.attention.documents import FIRST, LAST, PLAIN_FIRST, PLAIN_LAST
from stretto.kernels.engine.attention.seeing import Range, Seeing
from stretto.kernels.engine.parts import Ref, Tile


def table(queries: jax.Array, keys: jax.Array, seeing: Seeing) -> jax.Array:
    """What the kernel reads of blocks of keys and chunks of queries.

    Returns:
      int32 `[batch * chunks, blocks, chunks of queries, documents.FIELDS]`, where "tiles" and
      "blocks" have changed places, and a count may be 0.

    Args:
      queries, keys: int32 `[batch * chunks, tokens of a chunk]`, the documents of both.
      seeing: which tiles see a block where all tokens are of one document.
    """
    visible = seeing.visible
    chunks, tiles, blocks = visible.chunks, visible.tiles_of_chunk, visible.blocks_of_chunk
    of_tiles = queries.reshape(-1, 1, 1, chunks, tiles, visible.rows)
    of_blocks = keys.reshape(-1, chunks, blocks, 1, 1, visible.block)
    first, last, *plain = documents.ranges(of_tiles, of_blocks, _by_place(seeing))
    count = jnp.broadcast_to((last - first).sum(-1, keepdims=True), first.shape)
    found = jnp.stack([first, last, *plain, count], -1).astype(jnp.int32)
    return found.reshape(-1, *found.shape[2:])


def _by_place(seeing: Seeing) -> jax.Array:
    """bool `[chunks, blocks, chunks of queries, tiles]`: what the mask leaves of one document."""
    visible = seeing.visible
    blocks = jnp.arange(visible.blocks_of_chunk, dtype=jnp.int32)[:, None]
    place = jnp.arange(visible.tiles_of_chunk, dtype=jnp.int32)

    def of(chunk: int, own: int) -> jax.Array:
        first, last = seeing.tiles(seeing.first_key(chunk, blocks), own)
        return jnp.broadcast_to((first <= place) & (place < last), (len(blocks), len(place)))

    each = [[of(chunk, own) for own in range(visible.chunks)] for chunk in range(visible.chunks)]
    return jnp.stack([jnp.stack(of_chunk, 1) for of_chunk in each])


@dataclasses.dataclass(frozen=True, kw_only=True)
class SeeingDocuments:
    """The documents inside the kernel.

    Attributes:
      seeing: the sizes of chunks, tiles and blocks.
      table: what the function of this name made.
      queries, keys: as that function takes them.
    """

    seeing: Seeing
    table: Ref
    queries: Ref
    keys: Ref

    def tiles(self, tile: Tile, chunk: Int) -> Range:
        """The tiles of a chunk of queries that a block of keys goes through."""
        first, last, plain_first, plain_last = (
            self.table[tile.step, tile.m, chunk, field]
            for field in (FIRST, LAST, PLAIN_FIRST, PLAIN_LAST)
        )
        return Range(first, last, plain_first, plain_last)

    def masked(self, scores: jax.Array, tile: Tile, row: Int, chunk: Int, place: Int) -> jax.Array:
        """Scores with minus infinity where key and query are of different documents.

        Args:
          scores: `[keys, queries]` of the block's keys from `row` on.
          chunk, place: of the tile of queries, which chunk of the device it lies in, and where.
        """
        visible = self.seeing.visible
        keys, queries = scores.shape
        batch_first = tile.step - rem(tile.step, visible.chunks)
        of_keys = self.keys.at[tile.step, pl.ds(tile.m * visible.block + row, keys)]
        of_queries = self.queries.at[batch_first + chunk, pl.ds(place * visible.rows, queries)]
        return documents.alike(scores, of_keys, of_queries)
