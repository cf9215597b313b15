"""Gathering rows of lhs shard after shard: the device's own first, then its successors'.

The peers' rows arrive during the arithmetic on the own rows. For shards that fill tiles.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
from jax import lax
from jax.experimental import pallas as pl

from stretto.distributed import copies, schedule
from stretto.distributed.schedule import Int, PullPlan
from stretto.distributed.team import Team
from stretto.kernels.engine import stages
from stretto.kernels.engine.fuse import Refs
from stretto.kernels.engine.orders import ShardOrder
from stretto.kernels.engine.parts import Arrival, Load, Ref, Stream, Tile
from stretto.kernels.engine.scales import load_arranged_rows, load_rows
from stretto.kernels.engine.tiles import TileShape, lhs_window, rhs_window
from stretto.kernels.fused.gather_ways import Gather, GatheredScales, Kept, PlannedFetch


def by_shards(
    team: Team,
    plan: PullPlan,
    n: int,
    shape: TileShape,
    *,
    columns: int,
    by_shard: bool,
    rhs_transposed: bool,
    blocks: int = 1,
    scales: PullPlan | None = None,
    has_mx: bool = False,
) -> Gather:
    """Shards `[plan.rows, plan.columns]`, whose pieces `plan` cuts, for a result of `n` columns.

    `by_shard` keeps the gathered rows in the order of the shards (`Kept`); they have room for
    `columns`. The step of a tile is the offset, on the ring, of the device whose rows it takes.
    With several `blocks` of whole tiles, that a shard consists of, the result has block after
    block, each of all shards.
    `scales` cuts the scales of a shard, `[k / 128 or 1, rows]`, if it has any. They are pulled
    before its rows, and count as its first chunk. With `has_mx`, every device has the scales of all
    shards from the start.
    """
    kept = Kept(team, by_shard)
    in_block = plan.rows // blocks // shape.tile_m  # Rows of tiles, where there are several.

    def leading(tile: Tile) -> tuple[Int, ...]:
        shard = schedule.shard_of_step(team.device_id(), tile.step, team.size)
        return (shard,) if blocks == 1 else (schedule.div(tile.m, in_block), shard)

    def row(tile: Tile) -> Int:
        return tile.m if blocks == 1 else tile.m - schedule.div(tile.m, in_block) * in_block

    def complete(gathered: jax.Array, lhs: jax.Array) -> jax.Array:
        return lax.dynamic_update_index_in_dim(gathered, lhs, team.device_id(), 0)

    return Gather(
        order=ShardOrder(plan.rows, n, shape, steps=team.size),
        k_tiles=schedule.ceil_div(plan.columns, shape.tile_k),
        lhs=lambda refs: _stream(refs, plan, kept, shape, scales.pieces if scales else 0),
        rhs_window=functools.partial(rhs_window, transposed=rhs_transposed),
        fetch=_Fetch(team, plan, kept),
        leading=leading,
        row=row,
        received=(team.size - 1, plan.chunks),
        out_rows=(*(() if blocks == 1 else (blocks,)), team.size, plan.rows // blocks),
        gathered=(kept.count, plan.rows, columns),
        shards=blocks * team.size,
        complete=complete,
        scales=_scales(team, scales, kept, shape, has_mx),
    )


def _scales(
    team: Team, plan: PullPlan | None, kept: Kept, shape: TileShape, has_mx: bool
) -> GatheredScales | None:
    if has_mx:
        return _all_scales(team, shape)
    return None if plan is None else _gathered_scales(team, plan, kept, shape)


def _all_scales(team: Team, shape: TileShape) -> GatheredScales:
    """The scales of the shard that a tile takes, of those that this device has of all shards."""

    def load_from(refs: Refs) -> Load:
        def of_shard(tile: Tile) -> Ref:
            shard = schedule.shard_of_step(team.device_id(), tile.step, team.size)
            return refs.lhs_scales.at[shard]

        return load_arranged_rows(of_shard, shape)

    return GatheredScales(load=load_from)


def _gathered_scales(team: Team, plan: PullPlan, kept: Kept, shape: TileShape) -> GatheredScales:
    """The scales of the device's own rows at step 0, later the gathered scales."""

    def load_from(refs: Refs) -> Load:
        own = load_rows(lambda tile: refs.lhs_scales, shape)
        peers = load_rows(lambda tile: refs.gathered_scales.at[kept.index(tile.step)], shape)

        def load(tile: Tile, k: Int, stage: Ref, barrier: Ref) -> None:
            pl.when(tile.step == 0)(lambda: own(tile, k, stage, barrier))
            pl.when(tile.step > 0)(lambda: peers(tile, k, stage, barrier))

        return load

    return GatheredScales(
        load=load_from, fetch=_Fetch(team, plan, kept), shape=(kept.count, plan.rows, plan.columns)
    )


def _stream(refs: Refs, plan: PullPlan, kept: Kept, shape: TileShape, scales: int) -> Stream:
    """The device's own rows at step 0, later the gathered rows, chunk of columns by chunk.

    The pieces of `scales` of each shard count as its first chunk.
    """

    def load(tile: Tile, k: Int, stage: Ref, barrier: Ref) -> None:
        window = lhs_window(shape, tile.m, k)

        @pl.when(tile.step == 0)
        def _():
            stages.fill(refs.lhs.at[window], stage, barrier)

        @pl.when(tile.step > 0)
        def _():
            shard = refs.gathered.at[kept.index(tile.step)]
            stages.fill(shard.at[window], stage, barrier)

    def wait(tile: Tile, chunk: Int) -> None:
        @pl.when(tile.step > 0)
        def _():
            # All blocks' pieces of this chunk, and of the shard's scales, are in place.
            pieces = plan.pieces_in_chunk(chunk)
            if scales:
                pieces += schedule.where(chunk == 0, scales, 0)
            refs.received.at[tile.step - 1, chunk].wait(pieces)

    return Stream(load=load, arrival=Arrival(columns=plan.chunk_columns, wait=wait))


@dataclasses.dataclass(frozen=True)
class _Fetch(PlannedFetch[PullPlan]):
    """All peers' shards, one after the other, in the order of the steps."""

    kept: Kept

    @property
    def num_pieces(self) -> int:
        """The places of all peers' shards."""
        return (self.team.size - 1) * self.plan.pieces

    def place(self, index: Int) -> copies.Place:
        """A piece of a peer's shard; the key is (peer, chunk)."""
        source, piece = self.plan.piece_of(index)
        row, column, chunk = self.plan.locate(piece)
        return copies.Place(source, row, column, (source, chunk))

    def destination(self, gathered: Ref, source: Int) -> Ref:
        """Where the shard of a peer is kept."""
        return gathered.at[self.kept.index(source + 1)]
