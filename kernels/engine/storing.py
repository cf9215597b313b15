"""The storing warp: stores finished tiles out of shared memory, for every main loop."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed.schedule import Int
from stretto.kernels.engine import joining
from stretto.kernels.engine.block import Block
from stretto.kernels.engine.parts import Ref, Sink, Tile


class Pieces(Protocol):
    """Pieces of a tile, and the buffers through which they leave the registers.

    Warps that hold totals arrive at `filled`, and the storing warp at `free`.
    """

    @property
    def filled(self) -> Ref:
        """Barriers, one a buffer: the piece is in it."""
        ...

    @property
    def free(self) -> Ref:
        """Barriers, one a buffer: its stores have read it."""
        ...

    @property
    def num_buffers(self) -> int:
        """Buffers, which are taken in turn."""
        ...

    @property
    def places(self) -> Sequence[Any]:
        """Where in a tile its pieces lie, in the order of their stores."""
        ...

    def store(self, sink: Sink, tile: Tile, buffer: int, place: Any) -> None:
        """Starts the copies of the piece at `place` from its buffer to where it goes."""


def store(
    block: Block,
    pieces: Pieces,
    bring: Callable[[Tile], None] | None = None,
    refill: Callable[[Tile, int], None] | None = None,
) -> None:
    """Stores one tile after another, as its pieces are filled.

    `bring` is called with each tile before its stores, for other work of this warp.
    `refill` is called with (tile, index of a piece) after the piece's buffer was read, and starts a
    copy into it; the threads that fill the buffer wait for that copy, and not for `free`.
    """
    if refill is None:
        for buffer in range(pieces.num_buffers):
            plgpu.barrier_arrive(pieces.free.at[buffer])  # All buffers are free at the start.
    block.before_stores()
    sink, shared = block.parts.sink, block.joining

    def store_tile(i: Int, tile: Tile, _: None) -> None:
        del i
        if shared is None:
            store_own(tile)
        else:
            joining.either(tile, functools.partial(shared.announce, tile), lambda: store_own(tile))

    def store_own(tile: Tile) -> None:
        if shared is not None:
            shared.gather(tile)
        if bring is not None:
            bring(tile)
        if sink.before is not None:
            sink.before(tile)
        if refill is None:
            _store_tile(sink, pieces, tile)
        else:
            _refill_and_store(sink, pieces, tile, refill)
        if sink.stored is not None:
            # The tile is in place, not only read: what is signalled may be used.
            plgpu.wait_smem_to_gmem(0, wait_read_only=False)
            sink.stored(tile)

    block.for_each_tile(store_tile, None)
    plgpu.wait_smem_to_gmem(0, wait_read_only=False)


def _store_tile(sink: Sink, pieces: Pieces, tile: Tile) -> None:
    """Stores a tile's pieces as they are filled; on return the buffers have been read."""
    buffers, places = pieces.num_buffers, pieces.places
    with jax.named_scope("store"):
        for index, place in enumerate(places):
            buffer = index % buffers
            # The warpgroup that holds the total has filled the buffer.
            plgpu.barrier_wait(pieces.filled.at[buffer])
            pieces.store(sink, tile, buffer, place)
            plgpu.commit_smem_to_gmem_group()
            if index >= buffers - 1:  # All buffers are in use: waits for the oldest.
                plgpu.wait_smem_to_gmem(buffers - 1, wait_read_only=True)
                # Publishes to those that fill buffers that this one has been read.
                plgpu.barrier_arrive(pieces.free.at[(index + 1) % buffers])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        # The same of the buffers that were in use at the end.
        for index in range(len(places) - buffers + 1, len(places)):
            plgpu.barrier_arrive(pieces.free.at[index % buffers])


def _refill_and_store(
    sink: Sink, pieces: Pieces, tile: Tile, refill: Callable[[Tile, int], None]
) -> None:
    """The same with buffers that are refilled; all are free at first, as they are on return."""
    buffers, places = pieces.num_buffers, pieces.places
    with jax.named_scope("store"):
        for index in range(buffers):
            refill(tile, index)
        for index, place in enumerate(places):
            buffer = index % buffers
            # Whoever holds the total has put the piece into the buffer.
            plgpu.barrier_wait(pieces.filled.at[buffer])
            pieces.store(sink, tile, buffer, place)
            plgpu.commit_smem_to_gmem_group()
            following = index + 1
            if buffers <= following < len(places):  # Its buffer is the oldest in use.
                plgpu.wait_smem_to_gmem(buffers - 1, wait_read_only=True)
                refill(tile, following)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
