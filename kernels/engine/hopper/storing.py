"""The storing warp: brings what the totals need, and stores what becomes of them."""

from __future__ import annotations

import jax
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.kernels.engine import partial
from stretto.kernels.engine.block import Block
from stretto.kernels.engine.hopper.folding import Folding
from stretto.kernels.engine.hopper.pieces import Pieces
from stretto.kernels.engine.hopper.tile_config import MULTIPLYING_WARPGROUPS
from stretto.kernels.engine.parts import Sink, Tile


def store(block: Block, pieces: Pieces, folding: Folding) -> None:
    """Stores tile after tile as the multiplying warpgroups hand them over."""
    for buffer in range(pieces.num_buffers):
        plgpu.barrier_arrive(pieces.free.at[buffer])  # All buffers are free at the start.
    block.before_stores()
    sink = block.parts.sink

    def tile_loop(i: jax.Array, _: None) -> None:
        tile = block.tile(i)
        folding.bring(tile)
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
        for index, place in enumerate(places):
            buffer = index % buffers
            # Both warpgroups have put their halves of the piece into the buffer.
            plgpu.barrier_wait(pieces.filled.at[buffer])
            for half in range(MULTIPLYING_WARPGROUPS):
                _store_piece(sink, pieces, tile, place, half, buffer)
            plgpu.commit_smem_to_gmem_group()
            if index >= buffers - 1:  # All buffers are in use: the oldest comes free.
                plgpu.wait_smem_to_gmem(buffers - 1, wait_read_only=True)
                # Publishes to the multiplying warpgroups that the buffer has been read.
                plgpu.barrier_arrive(pieces.free.at[(index + 1) % buffers])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        # The same of the buffers that were in use at the end.
        for index in range(len(places) - buffers + 1, len(places)):
            plgpu.barrier_arrive(pieces.free.at[index % buffers])


def _store_piece(
    sink: Sink, pieces: Pieces, tile: Tile, place: tuple[int, int], half: int, buffer: int
) -> None:
    """Starts the copies of a piece of one half, or of those of its rows that are stored."""
    row, column = pieces.within_tile(place, half)
    if pieces.edge is None:
        sink.store(tile, pieces.out.at[half, buffer], row, column)
        return
    whole, edge = pieces.out.at[half, buffer], pieces.edge.at[half, buffer]
    partial.store(sink, tile, whole, edge, row, column)
