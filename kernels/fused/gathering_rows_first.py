"""Gathering rows of lhs first: all of them into one small matrix, which is then multiplied.

A shard smaller than a tile would leave most of the tile empty, and every block would load rhs
once for each shard. While the rows arrive, the ring of stages fills with rhs.

The device copies its own rows as well. They also pad the last tile: where a tile reaches beyond its
array, the copy engine fills in zeros, which took longer than existing rows (64 x 8192 x 28672 on
4 H200s: 82 us, and 56 in a trial with an array of whole tiles).
"""

from __future__ import annotations

import dataclasses
import functools

from jax.experimental import pallas as pl

from stretto.distributed import copies, schedule
from stretto.distributed.schedule import Int, PullPlan
from stretto.distributed.team import Team
from stretto.kernels.engine import streams, transfers
from stretto.kernels.engine.fuse import Refs
from stretto.kernels.engine.orders import ShardOrder
from stretto.kernels.engine.parts import Arrival, Ref, Stream, Tile
from stretto.kernels.engine.tiles import TileShape, lhs_window, rhs_window
from stretto.kernels.fused.gather_ways import Gather, PlannedFetch


def rows_first(
    team: Team, plan: PullPlan, m_shard: int, n: int, shape: TileShape, *, rhs_transposed: bool
) -> Gather:
    """Shards of `m_shard` rows, for a result of `n` columns.

    `plan` cuts the matrix of all rows and the padding of its last tile into pieces, each within
    one shard. The step of a tile is 0.
    """
    rows = team.size * m_shard
    return Gather(
        order=ShardOrder(rows, n, shape),
        k_tiles=schedule.ceil_div(plan.columns, shape.tile_k),
        lhs=lambda refs: _stream(refs, plan, shape),
        rhs_window=functools.partial(rhs_window, transposed=rhs_transposed),
        fetch=_Fetch(team, plan, m_shard),
        received=(plan.chunks,),
        out_rows=(rows,),
        gathered=(plan.rows, plan.columns),
        shards=team.size,
        complete=lambda gathered, lhs: gathered[:rows],
    )


def rows_that_fill_tiles(rows: int, m_shard: int, tile_m: int) -> int:
    """The least number of rows in whole shards that fills the tiles of `rows` rows."""
    in_tiles = schedule.ceil_div(rows, tile_m) * tile_m
    return schedule.ceil_div(in_tiles, m_shard) * m_shard


def _stream(refs: Refs, plan: PullPlan, shape: TileShape) -> Stream:
    """Gathered rows only, chunk of columns by chunk."""

    def wait(tile: Tile, chunk: Int) -> None:
        del tile
        # All blocks' pieces of this chunk are in place.
        refs.received.at[chunk].wait(plan.pieces_in_chunk(chunk))

    gathered = streams.of(refs.gathered, lambda tile, k: lhs_window(shape, tile.m, k))
    arrival = Arrival(columns=plan.chunk_columns, wait=wait)
    return dataclasses.replace(gathered, arrival=arrival)


@dataclasses.dataclass(frozen=True)
class _Fetch(PlannedFetch[PullPlan]):
    """The device's own shard, then the peers', then its own again for what fills up."""

    m_shard: int

    def place(self, index: Int) -> copies.Place:
        """A piece of the rows at `row`, from the device as many shards further."""
        row, column, chunk = self.plan.locate(index)
        source = schedule.div(row, self.m_shard)
        return copies.Place(source, row - source * self.m_shard, column, (chunk,))

    def sources(self, lhs: Ref) -> list[Ref]:
        """The places of the own shard, of the peers', and of the padding from the own shard."""
        filling = self.plan.rows // self.m_shard - self.team.size
        return [lhs, *transfers.on_peers(lhs, self.team), *[lhs] * filling]

    def destination(self, gathered: Ref, source: Int) -> Ref:
        """The rows of a shard among all; rows that fill the last tile follow."""
        shard = schedule.shard_of_step(self.team.device_id(), source, self.team.size)
        place = schedule.where(source < self.team.size, shard, source)
        return gathered.at[pl.ds(place * self.m_shard, self.m_shard)]
