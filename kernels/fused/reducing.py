"""The transfer of products to the owners of their rows, and the sums there.

The protocol is that of `matmul_reduce_scatter`, whose table names the memory and the semaphores.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed import copies, kernel, schedule
from stretto.distributed.schedule import Int
from stretto.distributed.team import Team
from stretto.kernels.engine import tiles
from stretto.kernels.engine.fuse import Refs
from stretto.kernels.engine.orders import OwnersOrder
from stretto.kernels.engine.parts import Addends, Fold, Ref, Sum, Tile
from stretto.kernels.engine.tiles import TileShape
from stretto.kernels.fused.add_config import AddConfig
from stretto.kernels.problem.machine import HOPPER


@dataclasses.dataclass(frozen=True)
class Products:
    """The stores, the fetches and the sums of a device's products.

    Attributes:
      team, order, refs: of the kernel.
      everywhere: whether each sum is stored on all devices.
      outs: this device's result, and the result of each device that gets its sums.
    """

    FOLD: ClassVar[type[Fold]] = Addends

    team: Team
    order: OwnersOrder
    refs: Refs
    everywhere: bool
    outs: Sequence[Ref]

    @property
    def peers(self) -> int:
        """The other devices; the step of the own tiles."""
        return self.team.size - 1

    @property
    def _blocks(self) -> int:
        """Blocks that make a tile together."""
        return self.order.shard.shape.blocks

    def fold(self, residual: Ref | None = None) -> Fold:
        """The addends of the own rows: the peers' products, and a matrix that lies as the result.

        Of the latter `residual` is the ref.
        """
        most = self.peers + (residual is not None)

        return Addends(
            most=most,
            count=lambda tile: schedule.where(tile.step == self.peers, most, 0),
            wait=self._wait,
            window=lambda tile, number, *piece: self._window(
                self.refs.fetched, number, tile, *piece
            ),
            last=None
            if residual is None
            else lambda tile, *piece: self._window(residual, 0, tile, *piece),
        )

    def before(self, tile: Tile) -> None:
        """Returns once a piece of the tile may be stored."""

    def _wait(self, tile: Tile) -> None:
        """Of an own tile: returns once all peers' products of it have been fetched."""
        block = 0 if self._blocks == 1 else kernel.block_in_cluster()
        arrived = self.refs.arrived.at[block, self._number(tile)]
        arrived.wait(self.peers, decrement=True)

    def store(self, tile: Tile, piece: Ref, row: Int, column: Int) -> None:
        """Stores a piece: of a product for its owner to fetch, or of a sum as the result."""
        rows, columns = piece.shape

        @pl.when(tile.step < self.peers)
        def _():
            window = self._window(self.refs.partial, tile.step, tile, row, rows, column, columns)
            plgpu.copy_smem_to_gmem(piece, window, commit_group=False)

        pl.when(tile.step == self.peers)(lambda: self._store_own(tile, piece, row, column))

    def _store_own(self, tile: Tile, piece: Ref, row: Int, column: Int) -> None:
        """Stores a piece of a sum as the result."""
        rows, columns = piece.shape
        index = self.team.device_id() if self.everywhere else 0
        for out in self.outs:
            window = self._window(out, index, tile, row, rows, column, columns)
            plgpu.copy_smem_to_gmem(piece, window, commit_group=False)

    def stored(self, tile: Tile) -> None:
        """Signals a tile that is in place: to its owner, or to every peer that got the sum."""
        for offset in self.team.peer_offsets:

            @pl.when(tile.step == offset - 1)
            def _(offset=offset):
                produced = self.refs.produced.at[offset - 1, self._number(tile)]
                produced.signal(peer_id=self.team.neighbour(offset))

        if self.everywhere:

            @pl.when(tile.step == self.peers)
            def _():
                for offset in self.team.peer_offsets:
                    self.refs.finished.signal(peer_id=self.team.neighbour(offset))

    def fetch(self) -> None:
        """Fetches whole tiles, one after another, in the order in which peers make them.

        All devices go through the tiles in one order, but for the rotation within a wave
        (`orders.OwnersOrder`), so the peers' tiles for this device arrive in the order of its own
        list. A tile is complete before this warp waits for the next one: a peer may compute the
        next tile only after it has received this one.
        """
        block, num_blocks = kernel.block_id(), self.refs.num_blocks
        sources = [
            copies.remote(self.refs.partial, self.team, self.team.neighbour(-step - 1)).at[step]
            for step in range(self.peers)
        ]

        def fetch_tile(i: jax.Array, _: None) -> None:
            tile = self.order.locate_for_peers(block + i * num_blocks)
            # The stores of all the peer's blocks that compute this tile are in place.
            produced = self.refs.produced.at[tile.step, self._number(tile)]
            produced.wait(self._blocks, decrement=True)
            self._fetch_tile(tile, sources)
            # Publishes the tile to the storing warps of the blocks that own it.
            for owner in range(self._blocks):
                self.refs.arrived.at[owner, self._number(tile)].signal()

        tiles_of_peers = self.peers * self.order.shard.tiles_per_shard
        lax.fori_loop(0, schedule.share(tiles_of_peers, block, num_blocks), fetch_tile, None)

    def _fetch_tile(self, tile: Tile, sources: Sequence[Ref]) -> None:
        """Fetches one tile, piece by piece."""
        shape, (_, piece_rows, piece_columns) = self.order.shard.shape, self.refs.pulled.shape
        across, down = shape.tile_n // piece_columns, shape.tile_m // piece_rows

        def place(piece: Int) -> copies.Place:
            row = schedule.div(piece, across)
            column = piece - row * across
            return copies.Place(
                tile.step,
                tile.m * shape.tile_m + row * piece_rows,
                tile.n * shape.tile_n + column * piece_columns,
            )

        copies.Pull(
            pieces=across * down,
            place=place,
            sources=sources,
            destination=self._fetched,
            buffers=self.refs.pulled,
            barriers=self.refs.pulled_full,
        ).run()

    def _fetched(self, step: Int) -> Ref:
        """Where a peer's products go."""
        return self.refs.fetched.at[step]

    def finish(self) -> None:
        """In block 0: returns once the peers have stored all their sums here, in an all-reduce."""
        if self.everywhere:
            tiles = self.peers * self.order.shard.tiles_per_shard
            self.refs.finished.wait(tiles * self._blocks, decrement=True)

    def _number(self, tile: Tile) -> Int:
        """The number of a tile among those of a shard."""
        return self.order.shard.index(tile.m, tile.n)

    def _window(self, ref: Ref, index: Int, tile: Tile, *piece: Int) -> Ref:
        """A piece of a tile in `ref[index]`: its first row, rows, first column, columns."""
        window = tiles.piece_window(self.order.shard.shape, tile.m, tile.n, *piece)
        return ref.at[index, *window]


@dataclasses.dataclass(frozen=True)
class InPlace(Products):
    """The same of two devices, where the copy engine adds.

    The peer's products are fetched to where the result lies, and own ones are added to them as they
    are stored. So a product is rounded to the result's type before it is added, as it is by XLA.
    """

    FOLD: ClassVar[type[Fold]] = Sum

    def fold(self, residual: Ref | None = None) -> Fold:
        """The products alone; there is no residual."""
        del residual
        return Sum()

    def before(self, tile: Tile) -> None:
        """Returns once a piece of the tile may be stored."""
        pl.when(tile.step == self.peers)(lambda: self._wait(tile))

    def _store_own(self, tile: Tile, piece: Ref, row: Int, column: Int) -> None:
        """Adds a piece of an own product to the result."""
        rows, columns = piece.shape
        window = self._window(self.refs.out, 0, tile, row, rows, column, columns)
        plgpu.copy_smem_to_gmem(piece, window, commit_group=False, reduction_op="add")

    def _fetched(self, step: Int) -> Ref:
        """The result, of which this is the only peer."""
        del step
        return self.refs.out.at[0]


def adds_in_place(
    lhs: Sequence[jax.Array], devices: int, config: AddConfig, everywhere: bool
) -> bool:
    """Whether products are added where the result lies (`InPlace`).

    With more peers each of their sums would be rounded, too.
    """
    in_8_bits = lhs[0].dtype.itemsize == 1 and config.tiles.architecture == HOPPER
    return in_8_bits and devices == 2 and not everywhere


def lhs_window(
    team: Team, shape: TileShape, lies: tuple[int, ...], m_shard: int, tile: Tile, k: Int
) -> tuple:
    """The tile of lhs, in the rows of the device whose result the tile belongs to.

    `lies` is the shape of lhs but for its columns: `(size, m_shard)`, `(blocks, size, rows)` or
    `(m,)`. Of one matrix a tile may end with rows of the next device, which are not stored.
    """
    rows, columns = tiles.lhs_window(shape, tile.m, k)
    owner = owner_of(team, tile)
    if len(lies) == 2:
        return owner, rows, columns
    if len(lies) == 3:
        in_block = lies[2] // shape.tile_m  # Rows of tiles.
        block = schedule.div(tile.m, in_block)
        rows, columns = tiles.lhs_window(shape, tile.m - block * in_block, k)
        return block, owner, rows, columns
    return pl.ds(owner * m_shard + tile.m * shape.tile_m, shape.tile_m), columns


def owner_of(team: Team, tile: Tile) -> Int:
    """The device whose result the tile belongs to; this device is the last."""
    return schedule.shard_of_step(team.device_id(), tile.step + 1, team.size)
