"""The draining warpgroup: takes totals out of tensor memory, and hands them over in pieces."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.kernels.engine.blackwell.accumulators import Accumulators
from stretto.kernels.engine.blackwell.adding import Adding
from stretto.kernels.engine.blackwell.pieces import Pieces
from stretto.kernels.engine.blackwell.tile_config import ACCUMULATORS
from stretto.kernels.engine.block import Block
from stretto.kernels.engine.parts import Tile


def drain(block: Block, accumulators: Accumulators, pieces: Pieces, adding: Adding | None) -> None:
    """Puts what becomes of the totals of tile after tile into the buffers of the store."""
    for half in range(ACCUMULATORS):
        plgpu.barrier_arrive(accumulators.drained.at[half])  # Both are free at the start.
    if adding is not None:
        adding.free_buffers()

    def tile_loop(i: jax.Array, turn: jax.Array) -> jax.Array:
        tile, half = block.tile(i), accumulators.of(i)
        # The tensor cores have made the total.
        plgpu.barrier_wait(accumulators.made.at[half])
        k_tiles = block.k_tiles(tile)
        if not isinstance(k_tiles, int):  # A tile without a contraction has had no product.
            pl.when(k_tiles == 0)(lambda: accumulators.clear(half, pieces.columns))
        with jax.named_scope("drain"):
            for index, column in enumerate(pieces.places):
                piece = accumulators.load(half, column, pieces.columns)
                if column == pieces.places[-1]:
                    # Publishes to the issuing warp that all of the accumulator has been read.
                    plgpu.barrier_arrive(accumulators.drained.at[half])
                if adding is not None:
                    piece, turn = adding.add(piece, tile, turn)
                _hand_over(block, pieces, tile, index, column, piece)
        return turn

    lax.fori_loop(0, block.num_tiles, tile_loop, jnp.int32(0))


def _hand_over(
    block: Block, pieces: Pieces, tile: Tile, index: int, column: int, piece: jax.Array
) -> None:
    """Puts a piece where the storing warp takes it from."""
    parts, buffer = block.parts, index % pieces.num_buffers
    if parts.epilogue is not None:
        piece = parts.epilogue(piece, tile, pieces.row, column)
    # The stores of the piece that was in the buffer have read it.
    plgpu.barrier_wait(pieces.free.at[buffer])
    pieces.fill(parts.sink, tile, buffer, piece)
    plgpu.commit_smem()
    # Publishes the piece to the storing warp.
    plgpu.barrier_arrive(pieces.filled.at[buffer])
