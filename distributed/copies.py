"""Copies between devices and global memory that run beside a kernel's arithmetic."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed.schedule import Int, PullPlan, ceil_div, div, rem, share
from stretto.distributed.semaphores import Semaphore
from stretto.distributed.team import Team


def remote(ref: Any, team: Team, peer_id: int | jax.Array) -> Any:
    """`ref`, an operand, result or symmetric buffer of the kernel, as member `peer_id` holds it.

    `peer_id` may depend on the device's own id but on nothing else that is known only while the
    kernel runs: the copy engine's descriptors are made before it starts.
    """
    return plgpu.remote_ref(ref, team.address(peer_id))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pull:
    """One warp of every block fetches shards from peers into local memory.

    Attributes:
      plan: the pieces.
      sources: one `[rows, columns]` ref a shard, in the order in which shards are wanted.
      destination: (index of the source) -> the local `[rows, columns]` ref it goes to.
      received: `received.at[i, chunk]` counts the pieces of source `i` that are in place; local.
      buffers: shared memory `[slots, piece_rows, piece_columns]`.
      barriers: one a slot, each completed by the arrival of a piece.
      num_blocks: blocks that share the work; each runs one warp of it.
    """

    plan: PullPlan
    sources: Sequence[Any]
    destination: Callable[[Int], Any]
    received: Semaphore
    buffers: Any
    barriers: Any
    num_blocks: int

    def run(self, block: jax.Array) -> None:
        """Fetches this block's pieces. On return they are in place and have been signalled.

        A piece goes through a slot of shared memory. While one is stored the next ones are on
        their way: a slot is filled again as soon as the store before last is over.
        """
        slots = self.buffers.shape[0]
        own = share(len(self.sources) * self.plan.pieces, block, self.num_blocks)
        for slot in range(slots):

            @pl.when(slot < own)
            def _(slot=slot):
                self._fetch(jnp.int32(slot), block)

        def step(i, _):
            self._keep(i, block)

            # At most the newest store is unfinished: the one before has left its slot.
            @pl.when(i > 0)
            def _():
                plgpu.wait_smem_to_gmem(1, wait_read_only=False)
                self._signal(i - 1, block)

                @pl.when(i - 1 + slots < own)
                def _():
                    self._fetch(i - 1 + slots, block)

        lax.fori_loop(0, own, step, None)

        @pl.when(own > 0)
        def _():
            plgpu.wait_smem_to_gmem(0, wait_read_only=False)
            self._signal(own - 1, block)

    def _place(self, i: jax.Array, block: jax.Array) -> tuple[Int, Int, Int, Int]:
        """(source, first row, first column, chunk) of this block's `i`-th piece."""
        piece = block + i * self.num_blocks
        source = div(piece, self.plan.pieces)
        return source, *self.plan.locate(piece - source * self.plan.pieces)

    def _fetch(self, i: jax.Array, block: jax.Array) -> None:
        source, row, column, _ = self._place(i, block)
        slot = rem(i, self.buffers.shape[0])
        for index, ref in enumerate(self.sources):

            @pl.when(source == index)
            def _(ref=ref):
                window = ref.at[
                    pl.ds(row, self.plan.piece_rows), pl.ds(column, self.plan.piece_columns)
                ]
                plgpu.copy_gmem_to_smem(window, self.buffers.at[slot], self.barriers.at[slot])

    def _keep(self, i: jax.Array, block: jax.Array) -> None:
        source, row, column, _ = self._place(i, block)
        slot = rem(i, self.buffers.shape[0])
        plgpu.barrier_wait(self.barriers.at[slot])
        window = self.destination(source).at[
            pl.ds(row, self.plan.piece_rows), pl.ds(column, self.plan.piece_columns)
        ]
        plgpu.copy_smem_to_gmem(self.buffers.at[slot], window)

    def _signal(self, i: jax.Array, block: jax.Array) -> None:
        source, _, _, chunk = self._place(i, block)
        self.received.at[source, chunk].signal()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Push:
    """One warpgroup of every block sends local arrays to where they are wanted.

    A piece is loaded once and stored to all of its destinations from there.

    Attributes:
      sources: local `[rows, columns]` refs.
      destinations: for each source the `[rows, columns]` refs, here or on peers, that it goes to.
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
