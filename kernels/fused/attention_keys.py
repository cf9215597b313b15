"""The keys and values of attention over a split sequence: the own ones, and how peers' arrive."""

from __future__ import annotations

import dataclasses

from jax.experimental import pallas as pl

from stretto.distributed import copies
from stretto.distributed.schedule import Int, div, rem
from stretto.distributed.team import Team
from stretto.kernels.engine import stages, transfers
from stretto.kernels.engine.attention.visible import VisibleKeys
from stretto.kernels.engine.fuse import Refs
from stretto.kernels.engine.parts import Arrival, Load, Ref, Stream, Tile
from stretto.kernels.fused.attention_config import Sizes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Keys:
    """Keys and values inside the kernel.

    Attributes:
      sizes: of the call.
      team: the devices; None if there is one.
      visible: which keys the tiles of this device see.
      refs: of the kernel.
    """

    sizes: Sizes
    team: Team | None
    visible: VisibleKeys
    refs: Refs

    def keys(self) -> Stream:
        """Blocks of keys; those of peers are waited for, and with them the values."""
        arrival = (
            None
            if self.team is None
            else Arrival(
                # Counted in steps of the contraction, which are segments: one wait for each.
                columns=self.visible.block,
                wait=self._wait,
            )
        )
        return Stream(load=self._load(self.refs.k, 0), arrival=arrival)

    def values(self) -> Stream:
        """Blocks of values."""
        return Stream(load=self._load(self.refs.v, 1))

    def _load(self, own: Ref, kind: int) -> Load:
        """Loads blocks of keys, of `kind` 0, or of values, of 1."""
        sizes, visible = self.sizes, self.visible

        def load(tile: Tile, place: Int, stage: Ref, barrier: Ref) -> None:
            segment = div(place, visible.blocks_of_chunk)
            block = place - segment * visible.blocks_of_chunk
            row = sizes.chunk(tile, segment) * visible.keys + block * visible.block
            window = pl.ds(row, visible.block), sizes.columns(sizes.kv_head(tile))
            if self.team is None:
                stages.fill(own.at[window], stage, barrier)
                return
            step = visible.step(segment)
            pl.when(step == 0)(lambda: stages.fill(own.at[window], stage, barrier))

            @pl.when(step > 0)
            def _():
                of_peer = self.refs.gathered.at[2 * (step - 1) + kind]
                stages.fill(of_peer.at[window], stage, barrier)

        return load

    def _wait(self, tile: Tile, segment: Int) -> None:
        """Returns once the keys and values of a segment are in place, if the tile sees some."""
        sizes, visible = self.sizes, self.visible
        step = visible.step(segment)
        query = visible.first_query(rem(tile.step, sizes.chunks), tile.m)
        first, last = visible.blocks(query, segment)

        @pl.when((step > 0) & (first < last))
        def _():
            key = step - 1, sizes.chunk(tile, segment), sizes.kv_head(tile)
            # All blocks' pieces of this chunk, of keys and of values, are in place.
            self.refs.received.at[key].wait(sizes.pieces_of_chunk)

    def pull(self) -> None:
        """What the pulling warp does."""
        refs = self.refs
        transfers.pull(
            _Fetch(self.sizes, self.team),
            (refs.k, refs.v),
            refs.gathered,
            # Publishes a piece to the polling warps of all blocks.
            arrived=lambda place: refs.received.at[place.key].signal(),
            buffers=refs.pulled,
            barriers=refs.pulled_full,
            num_blocks=refs.num_blocks,
        )


@dataclasses.dataclass(frozen=True)
class _Fetch:
    """The peers' keys and values: head by head, of each the peers' in the order of the steps."""

    sizes: Sizes
    team: Team | None

    @property
    def num_pieces(self) -> int:
        """Of all peers."""
        sizes = self.sizes
        heads = sizes.batch * sizes.kv_heads
        return heads * sizes.peers * sizes.chunks * sizes.pieces_of_chunk

    @property
    def piece(self) -> tuple[int, int]:
        """Keys, and elements of each."""
        return self.sizes.config.pull_rows, self.sizes.dim

    def place(self, index: Int) -> copies.Place:
        """The piece at `index`, of keys and of values in turn; the key is that of `received`."""
        sizes = self.sizes
        of_chunk = div(index, sizes.pieces_of_chunk)
        within = index - of_chunk * sizes.pieces_of_chunk
        down = div(within, 2)
        of_peer = div(of_chunk, sizes.chunks)
        of_head = div(of_peer, sizes.peers)
        batch = div(of_head, sizes.kv_heads)
        peer, head = of_peer - of_head * sizes.peers, of_head - batch * sizes.kv_heads
        chunk = batch * sizes.chunks + of_chunk - of_peer * sizes.chunks
        return copies.Place(
            2 * peer + within - 2 * down,
            chunk * sizes.visible.keys + down * sizes.config.pull_rows,
            head * sizes.dim,
            (peer, chunk, head),
        )

    def sources(self, ref: tuple[Ref, Ref]) -> list[Ref]:
        """Keys and values of each peer in turn."""
        if self.team is None:
            return []
        pairs = zip(*(transfers.on_peers(x, self.team) for x in ref), strict=True)
        return [x for pair in pairs for x in pair]

    def destination(self, gathered: Ref, source: Int) -> Ref:
        """Where they are kept."""
        return gathered.at[source]
