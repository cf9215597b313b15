"""Gathering columns of lhs, the contraction, under the matmul.

Every tile needs all columns of its rows, so every tile depends on the peers. Each tile begins with
the device's own columns, and continues with the peers' in the order of the ring. The peers' columns
are fetched in bands of rows, as high as those of the tiles' raster, so that the first tiles need
few rows.
"""

from __future__ import annotations

import dataclasses

import jax
from jax import lax
from jax.experimental import pallas as pl

from stretto.distributed import copies, schedule
from stretto.distributed.schedule import BandedPullPlan, Int
from stretto.distributed.team import Team
from stretto.kernels.engine import stages, tiles
from stretto.kernels.engine.fuse import Refs
from stretto.kernels.engine.orders import ShardOrder
from stretto.kernels.engine.parts import Arrival, Ref, Stream, Tile
from stretto.kernels.engine.tiles import TileShape, lhs_window
from stretto.kernels.fused.gather_ways import Gather, Kept, PlannedFetch


def by_columns(
    team: Team,
    plan: BandedPullPlan,
    n: int,
    shape: TileShape,
    *,
    columns: int,
    by_shard: bool,
    rhs_transposed: bool,
) -> Gather:
    """Shards `[plan.rows, plan.columns]` for a result of `n` columns.

    `plan` cuts the peers' columns into pieces; a chunk of it has the rows of a tile. `by_shard`
    keeps the gathered columns in the order of the shards (`Kept`), each of which has room for
    `columns`. The step of a tile is 0.

    Each of rhs is `[devices, k_shard, n_i]`, or `[n_i, devices, k_shard]`: the last tile of a
    device's part of the contraction is padded with zeros.
    """
    kept = Kept(team, by_shard)
    tiles_of_shard = schedule.ceil_div(plan.columns, shape.tile_k)

    def rhs_window(tile: TileShape, k: Int, n: Int) -> tuple:
        step, within = _step(k, tiles_of_shard)
        shard = schedule.shard_of_step(team.device_id(), step, team.size)
        first, second = tiles.rhs_window(tile, within, n, rhs_transposed)
        return (first, shard, second) if rhs_transposed else (shard, first, second)

    def complete(gathered: jax.Array, lhs: jax.Array) -> jax.Array:
        return lax.dynamic_update_index_in_dim(gathered, lhs, team.device_id(), 1)

    return Gather(
        order=ShardOrder(plan.rows, n, shape),
        k_tiles=team.size * tiles_of_shard,
        lhs=lambda refs: _stream(refs, plan, kept, shape),
        rhs_window=rhs_window,
        fetch=_Fetch(team, plan, kept),
        received=(plan.sources, plan.chunks),
        out_rows=(plan.rows,),
        gathered=(plan.rows, kept.count, columns),
        shards=1,
        complete=complete,
    )


def _step(k: Int, tiles_of_shard: int) -> tuple[Int, Int]:
    """(step, tile within its shard) of tile `k` along the contraction."""
    step = schedule.div(k, tiles_of_shard)
    return step, k - step * tiles_of_shard


def _stream(refs: Refs, plan: BandedPullPlan, kept: Kept, shape: TileShape) -> Stream:
    """The device's own columns, then the gathered columns, shard by shard."""

    tiles_of_shard = schedule.ceil_div(plan.columns, shape.tile_k)

    def load(tile: Tile, k: Int, stage: Ref, barrier: Ref) -> None:
        step, within = _step(k, tiles_of_shard)
        rows, columns = lhs_window(shape, tile.m, within)

        @pl.when(step == 0)
        def _():
            stages.fill(refs.lhs.at[rows, columns], stage, barrier)

        @pl.when(step > 0)
        def _():
            window = refs.gathered.at[rows, kept.index(step), columns]
            stages.fill(window, stage, barrier)

    def wait(tile: Tile, step: Int) -> None:
        @pl.when(step > 0)
        def _():
            # All blocks' pieces of the shard's columns are in place, in the tile's rows.
            refs.received.at[step - 1, tile.m].wait(plan.pieces_in_chunk(tile.m))

    columns = tiles_of_shard * shape.tile_k
    return Stream(load=load, arrival=Arrival(columns=columns, wait=wait))


@dataclasses.dataclass(frozen=True)
class _Fetch(PlannedFetch[BandedPullPlan]):
    """All peers' columns, band of rows after band."""

    kept: Kept

    def place(self, index: Int) -> copies.Place:
        """A piece of a peer's columns; the key is (peer, row of tiles)."""
        source, row, column, chunk = self.plan.locate(index)
        return copies.Place(source, row, column, (source, chunk))

    def destination(self, gathered: Ref, source: Int) -> Ref:
        """Where the columns of a peer are kept."""
        return gathered.at[:, self.kept.index(source + 1)]
