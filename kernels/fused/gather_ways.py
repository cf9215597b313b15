"""A way of gathering lhs under an all-gather matmul, and what all ways have in common.

A way is four things (`Gather`): an order of the tiles, the stream of lhs with what it waits for,
the plan of what is fetched, and the place of a tile in the result. `gathering.launch` makes a
kernel of them.

| way | for |
|---|---|
| `gathering_by_shards` | rows, in shards that fill tiles: shard after shard |
| `gathering_rows_first` | rows, in shards smaller than a tile: all of them first, as one matrix |
| `gathering_by_columns` | columns, the contraction |
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax

from stretto.distributed import schedule
from stretto.distributed.schedule import BandedPullPlan, Int, PullPlan
from stretto.distributed.team import Team
from stretto.kernels.engine import padding, transfers
from stretto.kernels.engine.fuse import Refs
from stretto.kernels.engine.orders import ShardOrder
from stretto.kernels.engine.parts import Load, Ref, Stream, Tile
from stretto.kernels.engine.tiles import TileShape
from stretto.kernels.engine.transfers import Fetch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gather:
    """A way of gathering lhs.

    Attributes:
      order: of the tiles of the result.
      k_tiles: length of the contraction, in tiles.
      lhs: the kernel's refs -> the stream of lhs, own and gathered (`gathered`), which waits for
        `received`.
      rhs_window: (shape of tiles, tile along the contraction, column of tiles) -> the window of
        rhs.
      fetch: what is fetched from peers; the key of a place is its index in `received`.
      leading: tile -> the indices of its matrix in the result.
      row: tile -> its row of tiles in that matrix.
      received: shape of the semaphores that count pieces.
      out_rows: shape of the result, but for its columns.
      gathered: shape of what is gathered, `[..., columns of lhs]`.
      shards: equal parts that the rows of the result consist of, one for each matrix.
      complete: (what was gathered, lhs) -> all shards in their order, the device's own among them.
      scales: how lhs's are gathered, of operands in 8 bits.
    """

    order: ShardOrder
    k_tiles: int
    lhs: Callable[[Refs], Stream]
    rhs_window: Callable[[TileShape, Int, Int], tuple]
    fetch: Fetch
    leading: Callable[[Tile], tuple[Int, ...]] = lambda tile: ()
    row: Callable[[Tile], Int] = lambda tile: tile.m
    received: tuple[int, ...]
    out_rows: tuple[int, ...]
    gathered: tuple[int, ...]
    shards: int
    complete: Callable[[jax.Array, jax.Array], jax.Array]
    scales: GatheredScales | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatheredScales:
    """The scales of lhs, which are gathered as its rows are, and ahead of them, or before the call.

    Attributes:
      load: the kernel's refs -> what loads those of a tile's rows, own (`lhs_scales`) and gathered
        (`gathered_scales`).
      fetch: what is fetched from peers; the key of a place is its index in `received`. None where
        the device has them all before the call.
      shape: of what is gathered.
    """

    load: Callable[[Refs], Load]
    fetch: Fetch | None = None
    shape: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class PlannedFetch[Plan: (PullPlan, BandedPullPlan)]:
    """What all fetches have in common: a plan that cuts what is gathered into pieces."""

    team: Team
    plan: Plan

    @property
    def num_pieces(self) -> int:
        """Of all that is fetched."""
        return self.plan.pieces

    @property
    def piece(self) -> tuple[int, int]:
        """Rows and columns of a piece."""
        return self.plan.piece_rows, self.plan.piece_columns

    def sources(self, lhs: Ref) -> list[Ref]:
        """The peers' own shards."""
        return transfers.on_peers(lhs, self.team)


@dataclasses.dataclass(frozen=True)
class Kept:
    """Where the shards of the peers are kept, in an array of several.

    Attributes:
      team: the devices.
      by_shard: in the order of the shards, with room for the device's own; if False, in the order
        of the steps, without its own.
    """

    team: Team
    by_shard: bool

    @property
    def count(self) -> int:
        """Number of shards in the buffer."""
        return self.team.size - (not self.by_shard)

    def index(self, step: Int) -> Int:
        """The index of the shard of `step`, which belongs to the device `step` places further."""
        shard = schedule.shard_of_step(self.team.device_id(), step, self.team.size)
        return shard if self.by_shard else step - 1


def kept_columns(lhs: jax.Array, by_shard: bool) -> int:
    """Columns that peers' shards like lhs are kept in: aligned, but where they are returned."""
    return lhs.shape[1] if by_shard else padding.in_lines(lhs.shape[1], lhs.dtype)
