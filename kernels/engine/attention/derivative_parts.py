"""The parts of attention's derivative: those of a matmul (`engine.parts`), and what it adds.

A tile has keys and values of a block, whose derivatives it makes: its `step` is their chunk of the
batch's, `m` the block in the chunk, `n` the head of keys. The "contraction" is over the queries
that see the block: tiles of queries (`lhs`) and of the result's derivatives (`rhs`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from stretto.distributed.schedule import Int, div, rem
from stretto.kernels.engine.attention.derivative_documents import SeeingDocuments
from stretto.kernels.engine.attention.seeing import Range, Seeing
from stretto.kernels.engine.parts import Parts, Ref, Tile


class Queries(NamedTuple):
    """A tile of queries.

    Attributes:
      head: of queries, within the group that shares a head of keys.
      chunk: of the device.
      tile: within the chunk.
      is_plain: whether it needs no mask of documents; None where none does.
    """

    head: Int
    chunk: Int
    tile: Int
    is_plain: Int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class DerivativeParts(Parts):
    """A kernel of attention's derivative, as the sum of its parts.

    Attributes:
      load_keys: (tile, keys, values, barrier): starts the copies of a block; see `Memory`.
      load_queries: (tile, queries, stages of queries, of the result's derivatives, of logsumexps
        and of row sums, barrier): starts the copies of a tile of queries.
      store_keys: (tile, keys, values): starts the copies of the derivatives of a block.
      stored_keys: called once the copies of all blocks are complete; None if nobody waits for them.
      clear: (pieces of zeros): sets the derivatives of queries to zero, where blocks add to them as
        they come; returns once all blocks of the grid have set theirs. None where they take turns.
      wait_for_turn: (tile, queries): returns once all earlier blocks have added theirs.
      add_queries: (tile, queries, warpgroup, piece): starts the copy of what the block gives to the
        derivative of queries; in turns the first block's is stored, and the others' are added.
      added: (tile, queries): publishes that the copies of all warpgroups are complete.
      seeing: which tiles of queries see a block.
      group: heads of queries for each head of keys.
      exponent: of a score, to the base 2: its scale, times the logarithm of e; above 0.
      scale: of the scores.
      documents: of queries and keys; None if all are of one. They say what blocks go through, too.
    """

    load_keys: Callable[[Tile, Ref, Ref, Ref], None]
    load_queries: Callable[[Tile, Queries, tuple[Ref, Ref, Ref, Ref], Ref], None]
    store_keys: Callable[[Tile, Ref, Ref], None]
    stored_keys: Callable[[], None] | None
    clear: Callable[[Ref], None] | None
    wait_for_turn: Callable[[Tile, Queries], None]
    add_queries: Callable[[Tile, Queries, int, Ref], None]
    added: Callable[[Tile, Queries], None]
    seeing: Seeing
    group: int
    exponent: float
    scale: float
    documents: SeeingDocuments | None = None

    def first_key(self, tile: Tile) -> Int:
        """The place in the sequence of a tile's first key."""
        return self.seeing.first_key(rem(tile.step, self.seeing.visible.chunks), tile.m)

    def first_query(self, queries: Queries) -> Int:
        """The place in the sequence of the first query of a tile of queries."""
        return self.seeing.visible.first_query(queries.chunk, queries.tile)

    def for_each_tile_of_queries[Carry](
        self, tile: Tile, body: Callable[[Queries, Carry], Carry], carry: Carry
    ) -> Carry:
        """Calls `body` for each tile of queries that sees the block.

        The tiles of a head of the group after each other, and from one to the tile before it. Where
        blocks take turns the last tile is first. Where they add as they come each one starts at a
        tile of its own: those that run at the same time would all add to the same memory at once.
        """
        visible = self.seeing.visible
        chunks = visible.chunks
        own = rem(tile.step, chunks) * visible.blocks_of_chunk + tile.m

        def of_chunk(index: jax.Array, carry: Carry) -> Carry:
            head = div(index, chunks)
            chunk = chunks - 1 - (index - head * chunks)
            seen = self._seen(tile, chunk)
            start = jnp.int32(seen.last - 1)
            if self.clear is not None:
                start -= lax.rem(own, jnp.maximum(jnp.int32(seen.last - seen.first), 1))

            def step(_: jax.Array, state: tuple[jax.Array, Carry]) -> tuple[jax.Array, Carry]:
                place, carry = state
                carry = body(Queries(head, chunk, place, seen.is_plain(place)), carry)
                return jnp.where(place == seen.first, seen.last - 1, place - 1), carry

            return lax.fori_loop(seen.first, seen.last, step, (start, carry))[1]

        return lax.fori_loop(0, self.group * chunks, of_chunk, carry)

    def _seen(self, tile: Tile, chunk: Int) -> Range:
        if self.documents is not None:
            return self.documents.tiles(tile, chunk)
        return Range(*self.seeing.tiles(self.first_key(tile), chunk))
