"""The storing warp: stores what the draining warpgroup hands over."""

from __future__ import annotations

import jax
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.kernels.engine.blackwell.pieces import Pieces
from stretto.kernels.engine.block import Block
from stretto.kernels.engine.parts import Sink, Tile


def store(block: Block, pieces: Pieces) -> None:
    """Stores tile after tile as its pieces are handed over."""
    for buffer in range(pieces.num_buffers):
        plgpu.barrier_arrive(pieces.free.at[buffer])  # All buffers are free at the start.
    block.before_stores()
    sink = block.parts.sink

    def tile_loop(i: jax.Array, _: None) -> None:
        tile = block.tile(i)
        _store_tile(sink, pieces, tile)
        if sink.stored is not None:
            # The tile is in place, not only read: what is signalled may be used.
            plgpu.wait_smem_to_gmem(0, wait_read_only=False)
            sink.stored(tile)

    lax.fori_loop(0, block.num_tiles, tile_loop, None)
    plgpu.wait_smem_to_gmem(0, wait_read_only=False)


def _store_tile(sink: Sink, pieces: Pieces, tile: Tile) -> None:
    """Stores a tile's pieces as they are handed over; on return the buffers have been read."""
    buffers, places = pieces.num_buffers, pieces.places
    with jax.named_scope("store"):
        for index, column in enumerate(places):
            buffer = index % buffers
            # The draining warpgroup has put the piece into the buffer.
            plgpu.barrier_wait(pieces.filled.at[buffer])
            pieces.store(sink, tile, buffer, column)
            plgpu.commit_smem_to_gmem_group()
            if index >= buffers - 1:  # All buffers are in use: the oldest comes free.
                plgpu.wait_smem_to_gmem(buffers - 1, wait_read_only=True)
                # Publishes to the draining warpgroup that the buffer has been read.
                plgpu.barrier_arrive(pieces.free.at[(index + 1) % buffers])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        # The same of the buffers that were in use at the end.
        for index in range(len(places) - buffers + 1, len(places)):
            plgpu.barrier_arrive(pieces.free.at[index % buffers])
