"""Where the gathered columns of lhs lie, in which order they come, and which tile takes which.

The other ways of gathering are in `gathering`, and have the same methods. Here every tile needs all
columns of its rows, so no tile is free of what the peers send: each begins with the device's own
columns, and the peers' follow in the order of the ring. So that the first tiles need few rows, the
peers' columns are fetched in bands of rows, as high as those of the tiles' raster.
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

type Tile = tuple[Int, Int, Int]


@dataclasses.dataclass(frozen=True)
class Columns:
    """All rows at once, shard after shard of the columns. A tile is (0, row, column of tiles).

    Attributes:
      team: the devices; columns are theirs in turn, `plan.columns` each, whole tiles.
      plan: of the pieces of the peers' columns; a chunk has the rows of a tile.
      n: columns of the result, all parts together.
      config: the tiles.
      by_shard: the gathered columns lie in the order of the shards, with room for the device's own;
        if False, in the order of the steps, without its own.
    """

    team: Team
    plan: schedule.BandedPullPlan
    n: int
    config: TileConfig
    by_shard: bool

    @property
    def order(self) -> tiles.ShardOrder:
        """The tiles."""
        return tiles.ShardOrder(self.plan.rows, self.n, self.config)

    @property
    def num_tiles(self) -> int:
        """Tiles of the result."""
        return self.order.tiles_per_shard

    @property
    def contraction(self) -> int:
        """Length of the contraction: the columns of all devices."""
        return self.team.size * self.plan.columns

    @property
    def gate_columns(self) -> int:
        """Columns that the matmul waits for at once: a device's."""
        return self.plan.columns

    @property
    def num_pieces(self) -> int:
        """Pieces that the blocks fetch together."""
        return self.plan.pieces

    @property
    def semaphores(self) -> tuple[int, ...]:
        """Shape of the array that counts pieces: of every peer, tile after tile of rows."""
        return self.plan.sources, self.plan.chunks

    def rows_shape(self, *, gathered: bool) -> tuple[int, ...]:
        """Shape, but for the columns, of the result or of the gathered columns."""
        shards = self.team.size if self.by_shard else self.plan.sources
        return (self.plan.rows, shards) if gathered else (self.plan.rows,)

    def place(self, index: Int) -> copies.Place:
        """Where the piece at `index`, in the order in which they are wanted, lies."""
        source, row, column, chunk = self.plan.locate(index)
        return copies.Place(source, row, column, (source, chunk))

    def sources(self, lhs: Any) -> list[Any]:
        """Whose columns are fetched."""
        peers = (self.team.neighbour(offset) for offset in self.team.peer_offsets)
        return [copies.remote(lhs, self.team, peer) for peer in peers]

    def destination(self, gathered: Any, source: Int) -> Any:
        """Where the columns of a source go."""
        return gathered.at[:, self._slot(source + 1)]

    def wait(self, received: Any, tile: Tile, step: Int) -> None:
        """Returns once the columns of the device `step` places further are in the tile's rows."""
        m = tile[1]

        @pl.when(step > 0)
        def _():
            received.at[step - 1, m].wait(self.plan.pieces_in_chunk(m))

    def load(self, lhs: Any, gathered: Any, tile: Tile, k: Int, slot: Any, barrier: Any) -> None:
        """Starts the copy of the tile's rows, the `k`-th columns of tiles, into shared memory."""
        m = tile[1]
        step, within = self._step(k)
        rows, columns = self.config.lhs_tile(m, within)

        @pl.when(step == 0)
        def _():
            plgpu.copy_gmem_to_smem(lhs.at[rows, columns], slot, barrier)

        @pl.when(step > 0)
        def _():
            window = gathered.at[rows, self._slot(step), columns]
            plgpu.copy_gmem_to_smem(window, slot, barrier)

    def rhs_k(self, k: Int) -> Int:
        """The row of tiles of rhs that the `k`-th columns of tiles are multiplied by."""
        step, within = self._step(k)
        shard = schedule.shard_of_step(self.team.device_id(), step, self.team.size)
        return shard * self._tiles_of_shard + within

    def out_window(self, out: Any, tile: Tile, rows: pl.Slice, columns: pl.Slice) -> Any:
        """Rows of the result."""
        del tile
        return out.at[rows, columns]

    def with_own(self, gathered: jax.Array, lhs: jax.Array) -> jax.Array:
        """What was gathered, by shard, and the own columns, multiplied where they are."""
        return lax.dynamic_update_index_in_dim(gathered, lhs, self.team.device_id(), 1)

    @property
    def _tiles_of_shard(self) -> int:
        return self.plan.columns // self.config.tile_k

    def _step(self, k: Int) -> tuple[Int, Int]:
        """(step, columns of tiles within its shard) of the `k`-th columns of tiles."""
        step = schedule.div(k, self._tiles_of_shard)
        return step, k - step * self._tiles_of_shard

    def _slot(self, step: Int) -> Int:
        shard = schedule.shard_of_step(self.team.device_id(), step, self.team.size)
        return shard if self.by_shard else step - 1
