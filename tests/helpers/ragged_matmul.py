"""A matmul that is in no kernel file yet: groups, their order and their contractions read from
memory while it runs. What a weight gradient of a mixture of experts needs of the engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from stretto.distributed import schedule
from stretto.kernels.engine import sinks, streams, tiles
from stretto.kernels.engine.architectures import mainloop_of
from stretto.kernels.engine.fuse import Refs, fuse
from stretto.kernels.engine.hopper.tile_config import TileConfig
from stretto.kernels.engine.orders import ShardOrder, raster
from stretto.kernels.engine.parts import Addends, Arrival, Parts, Product, Sum, Tile
from stretto.kernels.engine.segments import Segments

CONFIG = TileConfig(tile_n=128, num_stages=4, store_buffers=2)


@dataclasses.dataclass(frozen=True)
class GroupsOrder:
    """Tiles of the groups that a table in memory names, one after the other."""

    groups: Any
    num_groups: Any
    of_a_group: ShardOrder

    def count(self) -> jax.Array:
        return self.num_groups[0] * self.of_a_group.tiles_per_shard

    def locate(self, index: schedule.Int) -> Tile:
        order = self.of_a_group
        place = schedule.div(index, order.tiles_per_shard)
        within = index - place * order.tiles_per_shard
        m, n = raster(within, order.m_tiles, order.n_tiles, order.shape.raster_width)
        return Tile(self.groups[place], m, n)


def ragged_matmul(
    lhs: jax.Array,
    rhs: jax.Array,
    sizes: jax.Array,
    groups: jax.Array,
    *,
    addend: jax.Array | None = None,
    columns_per_gate: tuple[int | None, int | None] = (None, None),
    wait: Callable[[Tile, Any], None] = lambda tile, gate: None,
    epilogue: Any = None,
    config: TileConfig = CONFIG,
) -> jax.Array:
    """`out[g] = lhs[:, columns of g] @ rhs[rows of g]` (+ `addend[g]`) for each g of `groups`.

    Args:
      lhs, rhs: `[m, k]` and `[k, n]`; the contraction lies group by group, and each group in whole
        tiles. `sizes` `[g]` are theirs.
      groups: which to make, in which order.
      addend: `[g, m, n]`, of the result's type.
      columns_per_gate: of lhs and of rhs, where they wait; `wait` is called for each.
    """
    m, n = lhs.shape[0], rhs.shape[1]
    k_tiles = (sizes // config.tile_k).astype(jnp.int32)
    first_tile = jnp.cumsum(k_tiles) - k_tiles
    num_groups = jnp.full((1,), groups.size, jnp.int32)
    of_a_group = ShardOrder(m, n, config)

    def parts(refs: Refs) -> Parts:
        def stream(ref, window, columns):
            made = streams.of(ref, window)
            arrival = Arrival(columns=columns, wait=wait) if columns else None
            return dataclasses.replace(made, arrival=arrival)

        def lhs_window(tile, k):
            return tiles.lhs_window(config, tile.m, refs.first_tile[tile.step] + k)

        def rhs_window(tile, k):
            return tiles.rhs_window(config, refs.first_tile[tile.step] + k, tile.n)

        def addend_window(tile, number, *piece):
            window = tiles.piece_window(config, tile.m, tile.n, *piece)
            return refs.addend.at[tile.step, *window]

        added = Addends(
            most=1, count=lambda tile: jnp.int32(1), wait=lambda tile: None, window=addend_window
        )
        return Parts(
            order=GroupsOrder(refs.groups, refs.num_groups, of_a_group),
            k_tiles=lambda tile: refs.k_tiles[tile.step],
            lhs=stream(refs.lhs, lhs_window, columns_per_gate[0]),
            rhs=stream(refs.rhs, rhs_window, columns_per_gate[1]),
            fold=Sum() if addend is None else added,
            epilogue=epilogue,
            sink=sinks.along_n(
                [refs.out], Segments.of([n], config.tile_n), config, lambda tile: (tile.step,)
            ),
        )

    product = Product(
        lhs=lhs.dtype,
        rhs=rhs.dtype,
        out=jnp.float32,
        fold=Sum if addend is None else Addends,
    )
    operands = dict(
        lhs=lhs,
        rhs=rhs,
        k_tiles=k_tiles,
        first_tile=first_tile.astype(jnp.int32),
        groups=groups.astype(jnp.int32),
        num_groups=num_groups,
    )
    results = fuse(
        parts,
        name="ragged_matmul",
        team=None,
        mainloop=mainloop_of(config, product),
        num_tiles=groups.size * of_a_group.tiles_per_shard,
        operands=operands | ({} if addend is None else dict(addend=addend)),
        outs=dict(out=jax.ShapeDtypeStruct((sizes.size, m, n), jnp.float32)),
        waits=any(columns_per_gate),
    )
    return results["out"]
