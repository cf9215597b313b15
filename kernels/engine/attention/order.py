"""The order of tiles of queries: heads that share keys together, tiles with most keys first."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

import jax.numpy as jnp

from stretto.distributed.schedule import Int, div, where
from stretto.kernels.engine.parts import Tile


class Tiles(Protocol):
    """Tiles by number, those of a head of keys together."""

    @property
    def num_tiles(self) -> int:
        """All tiles."""
        ...

    @property
    def together(self) -> int:
        """The tiles of a head of keys."""
        ...

    @property
    def num_blocks(self) -> int:
        """That share them."""
        ...

    def tile(self, number: Int, /) -> Tile:
        """The tile of this number."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionOrder:
    """Tiles of queries of all heads of a batch.

    A tile's `step` is its chunk of the batch's (`batch * chunks + chunk`), `m` its place within the
    chunk, and `n` its head. The keys of one head of keys after another are wanted, and so pulled.
    Of one head of keys, the last queries of the last chunk come first: under a causal mask these
    see most. Blocks take tiles in turn, every other time from the other end, so that none always
    gets the larger ones.

    Attributes:
      batch, chunks, tiles: sequences, chunks of each, tiles of queries in a chunk.
      kv_heads, group: heads of keys, and of queries for each of them.
      num_blocks: that share the tiles; block `b` takes those at `b`, `b + num_blocks`, ...
    """

    batch: int
    chunks: int
    tiles: int
    kv_heads: int
    group: int
    num_blocks: int

    @property
    def num_tiles(self) -> int:
        """All tiles."""
        return self.batch * self.kv_heads * self.together

    @property
    def together(self) -> int:
        """The tiles of a head of keys."""
        return self.group * self.chunks * self.tiles

    def count(self) -> int:
        """All tiles."""
        return self.num_tiles

    def locate(self, index: Int) -> Tile:
        """The tile at `index`."""
        return self.tile(back_and_forth(index, self.num_blocks, self.num_tiles))

    def tile(self, number: Int) -> Tile:
        """The tile of this number: those of one head of keys after another, most keys first."""
        of_keys = div(number, self.together)
        batch = div(of_keys, self.kv_heads)
        kv_head = of_keys - batch * self.kv_heads
        within = number - of_keys * self.together
        place = div(within, self.group)
        head = kv_head * self.group + within - place * self.group
        place = self.chunks * self.tiles - 1 - place
        chunk = div(place, self.tiles)
        return Tile(batch * self.chunks + chunk, place - chunk * self.tiles, head)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvenOrder:
    """Tiles that a table shares out so that all blocks have equal work (`even_shares`).

    Attributes:
      tiles: all of them.
      entry: (index) -> the number of a tile, from the table.
    """

    tiles: Tiles
    entry: Callable[[Int], Int]

    def count(self) -> int:
        """All tiles."""
        return self.tiles.num_tiles

    def locate(self, index: Int) -> Tile:
        """The tile at `index`, whose block takes it in its turn."""
        return self.tiles.tile(self.entry(index))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SortedOrder:
    """Tiles of all heads at one place after another, the places with most keys first.

    For work that is known when the kernel runs: blocks take tiles in turn, back and forth, and have
    nearly equal work as it falls from wave to wave. Keys of all heads are wanted from the start.

    Attributes:
      tiles: all of them.
      of_step: how many have the same `step` and head.
      heads: at each place.
      place: (index) -> the number of a place, `step * of_step + m`, in the order of the work.
    """

    tiles: Tiles
    of_step: int
    heads: int
    place: Callable[[Int], Int]

    def count(self) -> int:
        """All tiles."""
        return self.tiles.num_tiles

    def locate(self, index: Int) -> Tile:
        """The tile at `index`; beyond the last one, any."""
        index = back_and_forth(index, self.tiles.num_blocks, self.count())
        index = jnp.minimum(index, self.count() - 1)
        at = div(index, self.heads)
        place = self.place(at)
        step = div(place, self.of_step)
        return Tile(step, place - step * self.of_step, index - at * self.heads)


def back_and_forth(index: Int, num_blocks: int, num_tiles: int) -> Int:
    """`index`, in every other full wave of `num_blocks` from the end of the wave on."""
    wave = div(index, num_blocks)
    first = wave * num_blocks
    turned = first + num_blocks - 1 - (index - first)
    is_turned = (wave - 2 * div(wave, 2) == 1) & (wave < num_tiles // num_blocks)
    return where(is_turned, turned, index)
