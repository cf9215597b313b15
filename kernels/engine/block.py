"""What all roles of a block share: the tiles that it makes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from stretto.distributed.kernel import cluster_id
from stretto.distributed.schedule import Int, share, where
from stretto.kernels.engine.joining import Joining
from stretto.kernels.engine.parts import Parts, Tile


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
    """The block that runs this code.

    Attributes:
      parts: of the kernel.
      num_clusters: of the grid; each makes tiles together, and is often one block.
      num_tiles: how many tiles are this cluster's.
      before_stores: what the storing role calls once, before its first tile.
      joining: what joins tiles that several blocks share; None where each is one block's.
    """

    parts: Parts
    num_clusters: int
    num_tiles: Int
    before_stores: Callable[[], None]
    joining: Joining | None = None

    @classmethod
    def of(
        cls,
        parts: Parts,
        num_clusters: int,
        before_stores: Callable[[], None],
        joining: Joining | None = None,
    ) -> Block:
        """The block, with its share of the tiles; made once, first in the kernel."""
        if parts.own_tiles is not None:
            num_tiles = parts.own_tiles(cluster_id())
        elif joining is not None:
            num_tiles = joining.remainder.waves + joining.remainder.share(cluster_id())
        else:
            num_tiles = share(parts.order.count(), cluster_id(), num_clusters)
        return cls(
            parts=parts,
            num_clusters=num_clusters,
            num_tiles=num_tiles,
            before_stores=before_stores,
            joining=joining,
        )

    def tile(self, i: Int) -> Tile:
        """Its `i`-th tile."""
        if self.joining is None:
            return self.parts.order.locate(cluster_id() + i * self.num_clusters)
        remainder = self.joining.remainder
        part = remainder.part(cluster_id(), i - remainder.waves)
        is_whole = i < remainder.waves
        whole, shared = cluster_id() + i * self.num_clusters, remainder.first_tile + part.number
        return self.parts.order.locate(where(is_whole, whole, shared))._replace(part=part)

    def for_each_tile[Carry](
        self, body: Callable[[Int, Tile, Carry], Carry], carry: Carry
    ) -> Carry:
        """Calls `body(i, tile, carry)` for each of its tiles in turn; returns the last carry.

        With `Parts.ahead` the next tile is located before `body` works on this one.
        """
        if not self.parts.ahead:
            return lax.fori_loop(
                0, self.num_tiles, lambda i, carry: body(i, self.tile(i), carry), carry
            )

        def step(i: jax.Array, state: tuple[Tile, Carry]) -> tuple[Tile, Carry]:
            tile, carry = state
            following = self.tile(i + 1)
            return following, body(i, tile, carry)

        return lax.fori_loop(0, self.num_tiles, step, (self.tile(jnp.int32(0)), carry))[1]

    def k_tiles(self, tile: Tile) -> Int:
        """The length of the contraction of a tile, or of this block's part of it, in tiles."""
        if tile.part is not None:
            return tile.part.steps
        k_tiles = self.parts.k_tiles
        return k_tiles if isinstance(k_tiles, int) else k_tiles(tile)
