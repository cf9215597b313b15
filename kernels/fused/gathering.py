"""Where the gathered rows of lhs lie, in which order they come, and which tile takes which.

`Shards` multiplies the shards one after the other, the device's own first, so that what the others
send comes in under the arithmetic. A shard smaller than a tile would waste most of it, and rhs
would pass through the multiprocessors once for each shard: `Whole` gathers the rows into one small
matrix, and while they come the ring fills with rhs.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed import copies, schedule
from stretto.distributed.schedule import Int
from stretto.distributed.team import Team
from stretto.kernels.engine import tiles
from stretto.kernels.engine.tile_config import TileConfig
from stretto.kernels.fused.gathering_columns import Columns

type Tile = tuple[Int, Int, Int]


@dataclasses.dataclass(frozen=True)
class _Rows:
    """What both have in common: whole rows, whose columns are taken in their order."""

    team: Team
    plan: schedule.PullPlan
    n: int
    config: TileConfig

    @property
    def order(self) -> tiles.ShardOrder:
        """The tiles."""
        return tiles.ShardOrder(self.plan.rows, self.n, self.config)

    @property
    def contraction(self) -> int:
        """Length of the contraction."""
        return self.plan.columns

    @property
    def gate_columns(self) -> int:
        """Columns that the matmul waits for at once."""
        return self.plan.chunk_columns

    def rhs_k(self, k: Int) -> Int:
        """The row of tiles of rhs that the `k`-th columns of tiles are multiplied by."""
        return k


@dataclasses.dataclass(frozen=True)
class Shards(_Rows):
    """Shard after shard. A tile is (step, row of tiles within the shard, column of tiles).

    Attributes:
      team: the devices; rows are theirs in turn.
      plan: of the pieces of one shard, `[plan.rows, plan.columns]`.
      n: columns of the result, all parts together.
      config: the tiles.
      by_shard: the gathered rows lie in the order of the shards, with room for the device's own;
        if False, in the order of the steps, without its own.
    """

    by_shard: bool

    @property
    def num_tiles(self) -> int:
        """Tiles of all shards."""
        return self.team.size * self.order.tiles_per_shard

    @property
    def num_pieces(self) -> int:
        """Pieces that the blocks fetch together."""
        return (self.team.size - 1) * self.plan.pieces

    @property
    def semaphores(self) -> tuple[int, ...]:
        """Shape of the array that counts pieces: of every peer's shard, chunk by chunk."""
        return self.team.size - 1, self.plan.chunks

    def rows_shape(self, *, gathered: bool) -> tuple[int, ...]:
        """Shape, but for the columns, of the result or of the gathered rows."""
        shards = self.team.size - (gathered and not self.by_shard)
        return shards, self.plan.rows

    def place(self, index: Int) -> copies.Place:
        """Where the piece at `index`, in the order in which they are wanted, lies."""
        source, piece = self.plan.piece_of(index)
        row, column, chunk = self.plan.locate(piece)
        return copies.Place(source, row, column, (source, chunk))

    def sources(self, lhs: Any) -> list[Any]:
        """Whose rows are fetched."""
        peers = (self.team.neighbour(offset) for offset in self.team.peer_offsets)
        return [copies.remote(lhs, self.team, peer) for peer in peers]

    def destination(self, gathered: Any, source: Int) -> Any:
        """Where the rows of a source go."""
        return self._shard(gathered, source + 1)

    def wait(self, received: Any, tile: Tile, chunk: Int) -> None:
        """Returns once the columns `chunk` of the rows that `tile` takes are in place."""
        step = tile[0]

        @pl.when(step > 0)
        def _():
            received.at[step - 1, chunk].wait(self.plan.pieces_in_chunk(chunk))

    def load(self, lhs: Any, gathered: Any, tile: Tile, k: Int, slot: Any, barrier: Any) -> None:
        """Starts the copy of the tile's rows, columns `k` of tiles, into shared memory."""
        step, m = tile[:2]
        window = self.config.lhs_tile(m, k)

        @pl.when(step == 0)
        def _():
            plgpu.copy_gmem_to_smem(lhs.at[window], slot, barrier)

        @pl.when(step > 0)
        def _():
            plgpu.copy_gmem_to_smem(self._shard(gathered, step).at[window], slot, barrier)

    def out_window(self, out: Any, tile: Tile, rows: pl.Slice, columns: pl.Slice) -> Any:
        """Rows of the shard that `tile` is of, in the result."""
        step = tile[0]
        shard = schedule.shard_of_step(self.team.device_id(), step, self.team.size)
        return out.at[shard, rows, columns]

    def with_own(self, gathered: jax.Array, lhs: jax.Array) -> jax.Array:
        """What was gathered, by shard, and the own rows, which were multiplied where they are."""
        return lax.dynamic_update_index_in_dim(gathered, lhs, self.team.device_id(), 0)

    def _shard(self, gathered: Any, step: Int) -> Any:
        shard = schedule.shard_of_step(self.team.device_id(), step, self.team.size)
        return gathered.at[shard if self.by_shard else step - 1]


@dataclasses.dataclass(frozen=True)
class Whole(_Rows):
    """All rows as one matrix, to which the device copies its own as well. A tile's step is 0.

    Its own rows also fill up the last tile: where a tile reaches beyond its array, the copy engine
    makes up zeros, which took longer than rows that are there (64 x 8192 x 28672 on 4 H200s, in a
    trial with an array of whole tiles: 82 us and 56).

    Attributes:
      team: the devices; rows are theirs in turn.
      plan: of the pieces of all rows and of what fills up, no piece in two shards.
      n: columns of the result, all parts together.
      config: the tiles.
      m_shard: rows of a device.
    """

    m_shard: int

    @property
    def order(self) -> tiles.ShardOrder:
        """The tiles."""
        return tiles.ShardOrder(self._rows, self.n, self.config)

    @property
    def num_tiles(self) -> int:
        """Tiles of the result."""
        return self.order.tiles_per_shard

    @property
    def num_pieces(self) -> int:
        """Pieces that the blocks fetch together."""
        return self.plan.pieces

    @property
    def semaphores(self) -> tuple[int, ...]:
        """Shape of the array that counts pieces: of all shards, chunk by chunk."""
        return (self.plan.chunks,)

    def rows_shape(self, *, gathered: bool) -> tuple[int, ...]:
        """Shape, but for the columns, of the result or of the gathered rows and what fills up."""
        return (self.plan.rows if gathered else self._rows,)

    def place(self, index: Int) -> copies.Place:
        """Where the piece at `index` lies: own rows first, then the successors' in turn."""
        row, column, chunk = self.plan.locate(index)
        source = schedule.div(row, self.m_shard)
        return copies.Place(source, row - source * self.m_shard, column, (chunk,))

    def sources(self, lhs: Any) -> list[Any]:
        """Whose rows are fetched: one's own, the peers', and what fills up."""
        peers = (self.team.neighbour(offset) for offset in self.team.peer_offsets)
        filling = self.plan.rows // self.m_shard - self.team.size
        return [lhs, *(copies.remote(lhs, self.team, peer) for peer in peers), *[lhs] * filling]

    def destination(self, gathered: Any, source: Int) -> Any:
        """Where the rows of a source go."""
        shard = schedule.shard_of_step(self.team.device_id(), source, self.team.size)
        place = schedule.where(source < self.team.size, shard, source)
        return gathered.at[pl.ds(place * self.m_shard, self.m_shard)]

    def wait(self, received: Any, tile: Tile, chunk: Int) -> None:
        """Returns once the columns `chunk` are in place."""
        del tile
        received.at[chunk].wait(self.plan.pieces_in_chunk(chunk))

    def load(self, lhs: Any, gathered: Any, tile: Tile, k: Int, slot: Any, barrier: Any) -> None:
        """Starts the copy of the tile's rows, columns `k` of tiles, into shared memory."""
        del lhs
        m = tile[1]
        plgpu.copy_gmem_to_smem(gathered.at[self.config.lhs_tile(m, k)], slot, barrier)

    def out_window(self, out: Any, tile: Tile, rows: pl.Slice, columns: pl.Slice) -> Any:
        """Rows of the result."""
        del tile
        return out.at[rows, columns]

    def with_own(self, gathered: jax.Array, lhs: jax.Array) -> jax.Array:
        """What was gathered."""
        del lhs
        return gathered[: self._rows]

    @property
    def _rows(self) -> int:
        return self.team.size * self.m_shard


type Layout = Shards | Whole | Columns


def layout(
    team: Team,
    m_shard: int,
    columns: int,
    n: int,
    config: TileConfig,
    pull: tuple[int, int, int],
    *,
    whole: bool,
    by_shard: bool,
) -> Layout:
    """How to gather shards `[m_shard, columns]` for a result of `n` columns.

    `pull` are the rows and columns of a piece and the columns of a chunk; `whole` asks for one
    matrix of all rows, `by_shard` for the gathered rows in the order of the shards.
    """
    rows, pull_columns, chunk_columns = pull

    def plan(of_rows: int, piece_rows: int) -> schedule.PullPlan:
        return schedule.PullPlan(
            rows=of_rows,
            columns=columns,
            piece_rows=piece_rows,
            piece_columns=pull_columns,
            chunk_columns=chunk_columns,
        )

    if whole:
        divisor = next(r for r in range(min(rows, m_shard), 0, -1) if m_shard % r == 0)
        in_tiles = schedule.ceil_div(team.size * m_shard, config.tile_m) * config.tile_m
        shards = schedule.ceil_div(in_tiles, m_shard)
        return Whole(team, plan(shards * m_shard, divisor), n, config, m_shard)
    return Shards(team, plan(m_shard, rows), n, config, by_shard)
