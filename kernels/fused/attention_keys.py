"""The keys and values of attention over a split sequence: the own ones, and how peers' arrive."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from stretto.distributed import copies
from stretto.distributed.schedule import Int, div, where
from stretto.distributed.team import Team
from stretto.kernels.engine import stages, transfers
from stretto.kernels.engine.attention.documents import Documents
from stretto.kernels.engine.attention.visible import SeenByPlace, VisibleKeys
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
      seen: which blocks of them a tile goes through.
      refs: of the kernel.
    """

    sizes: Sizes
    team: Team | None
    visible: VisibleKeys
    seen: Documents | SeenByPlace
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
                of_peer = self.refs.gathered[kind].at[step - 1]
                stages.fill(of_peer.at[window], stage, barrier)

        return load

    def _wait(self, tile: Tile, segment: Int) -> None:
        """Returns once the keys and values of a segment are in place, if the tile sees some."""
        sizes, visible = self.sizes, self.visible
        step = visible.step(segment)
        first, last = self.seen.blocks(tile, segment)

        @pl.when((step > 0) & (first < last))
        def _():
            key = step - 1, sizes.chunk(tile, segment), sizes.kv_head(tile)
            # All blocks' pieces of this chunk, of keys and of values, are in place.
            self.refs.received.at[key].wait(sizes.pieces_of_chunk)

    def pull(self) -> None:
        """What the pulling warp does."""
        refs = self.refs
        transfers.pull(
            _Fetch.of(self.sizes, self.team, self.visible),
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
    """The peers' keys and values: head by head, of each the peers' in the order of the steps.

    Of chunks that no query of this device sees nothing is fetched.

    Attributes:
      sizes: of the call.
      team: the devices; None if there is one.
      seen: the peers' chunks, bit by bit, that are fetched.
      count: how many these are.
    """

    sizes: Sizes
    team: Team | None
    seen: Int
    count: Int

    @classmethod
    def of(cls, sizes: Sizes, team: Team | None, visible: VisibleKeys) -> _Fetch:
        """What this device fetches."""
        seen: Int = 0
        count: Int = 0
        for bit, segment in enumerate(range(sizes.chunks, visible.segments)):
            is_seen = visible.is_seen(segment)
            seen, count = seen + where(is_seen, 1 << bit, 0), count + where(is_seen, 1, 0)
        return cls(sizes, team, seen, count)

    @property
    def num_pieces(self) -> Int:
        """Of all peers."""
        return self.sizes.batch * self.sizes.kv_heads * self.count * self.sizes.pieces_of_chunk

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
        of_head = lax.div(of_chunk, jnp.maximum(self.count, 1))
        batch = div(of_head, sizes.kv_heads)
        head = of_head - batch * sizes.kv_heads
        segment = self._segment(of_chunk - of_head * self.count)
        peer = div(segment, sizes.chunks)
        chunk = batch * sizes.chunks + segment - peer * sizes.chunks
        return copies.Place(
            2 * peer + within - 2 * down,
            chunk * sizes.visible.keys + down * sizes.config.pull_rows,
            head * sizes.dim,
            (peer, chunk, head),
        )

    def _segment(self, number: Int) -> Int:
        """Which of the peers' chunks is the one at `number` of those that are fetched."""
        if isinstance(self.count, int):
            return number
        found, passed = jnp.int32(0), jnp.int32(0)
        for bit in range(self.sizes.peers * self.sizes.chunks):
            is_seen = (self.seen >> bit) & 1
            found = where((is_seen == 1) & (passed == number), bit, found)
            passed = passed + is_seen
        return found

    def sources(self, ref: tuple[Ref, Ref]) -> list[Ref]:
        """Keys and values of each peer in turn."""
        if self.team is None:
            return []
        pairs = zip(*(transfers.on_peers(x, self.team) for x in ref), strict=True)
        return [x for pair in pairs for x in pair]

    def destination(self, gathered: tuple[Ref, Ref], source: Int) -> copies.OneOf:
        """Where they are kept."""
        peer = div(source, 2)
        return copies.OneOf(source - 2 * peer, [x.at[peer] for x in gathered])
