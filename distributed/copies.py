"""Copies between devices and global memory that run beside a kernel's arithmetic."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed.by_name import by_name
from stretto.distributed.schedule import Int, ceil_div, div, rem, share
from stretto.distributed.team import Team

MOST_BARRIERS = 32
"""Of one array, and so buffers whose copies have a barrier each (Mosaic GPU, JAX 0.11.2)."""


def remote(ref: Any, team: Team, peer_id: int | jax.Array) -> Any:
    """The `ref` of member `peer_id`: an operand, result or symmetric buffer of the kernel.

    `peer_id` may depend on the device's own id but on nothing else that is known only while the
    kernel runs: the copy engine's descriptors are made before it starts.
    """
    return plgpu.remote_ref(ref, cast(Any, team.address(peer_id)))


def _when(condition: bool | jax.Array) -> Callable[[Callable[[], None]], None]:
    """`pl.when`, or a plain `if` for a condition that is known while tracing."""
    if isinstance(condition, bool):
        return lambda fun: fun() if condition else None
    return pl.when(condition)


@dataclasses.dataclass(frozen=True)
class Place:
    """The place of a piece of a pull: in `sources[source]`, from (`row`, `column`) on.

    Attributes:
      source, row, column: see above.
      key: data of the kernel, such as the semaphore that counts the piece.
      to: (row, column) in the destination, if they differ from those in the source.
    """

    source: Int
    row: Int
    column: Int
    key: Any = None
    to: tuple[Int, Int] | None = None


class OneOf(NamedTuple):
    """One of several refs, which a number chooses that is known in the kernel."""

    index: Int
    refs: Sequence[Any]


@by_name
@dataclasses.dataclass(frozen=True, kw_only=True)
class Pull:
    """One warp of a block fetches pieces of peers' arrays into local memory.

    A piece goes through a slot of shared memory. While one is stored, the next ones are loaded: a
    slot is filled again as soon as its store has ended.

    A piece that crosses the edge of its array is cut off, at the source and at the destination. It
    must then not be contiguous in `destination`, as one row is, or rows as wide as the array: the
    store would continue past the edge (`windows`), and `kernel.launch` refuses it.

    Attributes:
      pieces: the number of pieces that this block fetches.
      place: the block's `i`-th piece -> its `Place`.
      sources: `[rows, columns]` refs, on peers.
      destination: index of the source -> the local `[rows, columns]` ref to store to, or `OneOf`
        several.
      arrived: called with the `Place` of each piece that is in place, if given.
      buffers: shared memory `[slots, piece_rows, piece_columns]`.
      barriers: one a slot, each completed by the arrival of a piece.
    """

    pieces: Int
    place: Callable[[Any], Place]
    sources: Sequence[Any]
    destination: Callable[[Int], Any]
    arrived: Callable[[Place], None] | None = None
    buffers: Any
    barriers: Any

    def run(self) -> None:
        """Fetches the pieces; on return all are in place and `arrived` has been called for each."""
        slots = self.buffers.shape[0]
        for slot in range(slots):
            _when(slot < self.pieces)(lambda slot=slot: self._fetch(jnp.int32(slot)))

        def step(i, _):
            self._keep(i)

            # At most the newest store is unfinished: the one before has left its slot.
            @pl.when(i > 0)
            def _():
                plgpu.wait_smem_to_gmem(1, wait_read_only=False)
                self._tell(i - 1)
                pl.when(i - 1 + slots < self.pieces)(lambda: self._fetch(i - 1 + slots))

        lax.fori_loop(0, self.pieces, step, None)

        @_when(self.pieces > 0)
        def _():
            plgpu.wait_smem_to_gmem(0, wait_read_only=False)
            self._tell(self.pieces - 1)

    def _tell(self, i: Int) -> None:
        if self.arrived is not None:
            self.arrived(self.place(i))

    def _window(self, ref: Any, row: Int, column: Int) -> Any:
        _, rows, columns = self.buffers.shape
        return ref.at[pl.ds(row, rows), pl.ds(column, columns)]

    def _fetch(self, i: jax.Array) -> None:
        place = self.place(i)
        slot = rem(i, self.buffers.shape[0])
        for index, ref in enumerate(self.sources):

            @pl.when(place.source == index)
            def _(ref=ref):
                window = self._window(ref, place.row, place.column)
                plgpu.copy_gmem_to_smem(window, self.buffers.at[slot], self.barriers.at[slot])

    def _keep(self, i: jax.Array) -> None:
        place = self.place(i)
        slot = rem(i, self.buffers.shape[0])
        plgpu.barrier_wait(self.barriers.at[slot])
        row, column = (place.row, place.column) if place.to is None else place.to
        found = self.destination(place.source)

        def store(ref: Any) -> None:
            plgpu.copy_smem_to_gmem(self.buffers.at[slot], self._window(ref, row, column))

        if not isinstance(found, OneOf):
            store(found)
            return
        for index, ref in enumerate(found.refs):
            pl.when(found.index == index)(lambda ref=ref: store(ref))


@by_name
@dataclasses.dataclass(frozen=True, kw_only=True)
class Push:
    """One warpgroup of every block sends local arrays to their destinations.

    A piece is loaded once and stored to all of its destinations from there. Pieces are contiguous,
    so their rows have to divide those of a destination that is part of a larger array (`windows`).

    Attributes:
      sources: local `[rows, columns]` refs.
      destinations: for each source the `[rows, columns]` refs, here or on peers, to store to.
      buffers: shared memory `[slots, piece_rows, columns]`.
      barriers: one a slot, each completed by the arrival of a piece.
      num_blocks: blocks that share the work.
    """

    sources: Sequence[Any]
    destinations: Sequence[Sequence[Any]]
    buffers: Any
    barriers: Any
    num_blocks: int

    @property
    def pieces(self) -> int:
        """Pieces of one source."""
        return ceil_div(self.sources[0].shape[0], self.buffers.shape[1])

    def run(self, block: jax.Array) -> None:
        """Sends this block's pieces; on return the stores are on their way, not waited for."""
        slots = self.buffers.shape[0]
        own = share(len(self.sources) * self.pieces, block, self.num_blocks)
        for slot in range(slots):
            pl.when(slot < own)(lambda slot=slot: self._fetch(jnp.int32(slot), block))

        def step(i, _):
            self._send(i, block)

            # At most the newest piece's stores are unfinished: the one before has left its slot.
            @pl.when((i > 0) & (i - 1 + slots < own))
            def _():
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                self._fetch(i - 1 + slots, block)

        lax.fori_loop(0, own, step, None)

    def _place(self, i: jax.Array, block: jax.Array) -> tuple[Int, Int]:
        """(source, first row) of this block's `i`-th piece."""
        piece = block + i * self.num_blocks
        source = div(piece, self.pieces)
        return source, (piece - source * self.pieces) * self.buffers.shape[1]

    def _fetch(self, i: jax.Array, block: jax.Array) -> None:
        source, row = self._place(i, block)
        slot = rem(i, self.buffers.shape[0])
        for index, ref in enumerate(self.sources):

            @pl.when(source == index)
            def _(ref=ref):
                window = ref.at[pl.ds(row, self.buffers.shape[1])]
                plgpu.copy_gmem_to_smem(window, self.buffers.at[slot], self.barriers.at[slot])

    def _send(self, i: jax.Array, block: jax.Array) -> None:
        source, row = self._place(i, block)
        slot = rem(i, self.buffers.shape[0])
        plgpu.barrier_wait(self.barriers.at[slot])
        for index, refs in enumerate(self.destinations):

            @pl.when(source == index)
            def _(refs=refs):
                for ref in refs:
                    window = ref.at[pl.ds(row, self.buffers.shape[1])]
                    plgpu.copy_smem_to_gmem(self.buffers.at[slot], window, commit_group=False)

        plgpu.commit_smem_to_gmem_group()
