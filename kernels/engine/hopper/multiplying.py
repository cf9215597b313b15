"""The multiplying warpgroups: each makes half the rows of a tile, and hands them over in pieces."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed.kernel import THREAD_AXIS
from stretto.distributed.schedule import Int
from stretto.kernels.engine import joining
from stretto.kernels.engine.block import Block
from stretto.kernels.engine.hopper.adding import Adding
from stretto.kernels.engine.hopper.applying import Applying
from stretto.kernels.engine.hopper.folding import Folding
from stretto.kernels.engine.hopper.pieces import Pieces
from stretto.kernels.engine.parts import Sink, Tile
from stretto.kernels.engine.ring import Ring


def multiply(ring: Ring, make: Callable[[], None]) -> None:
    """Called in each multiplying warpgroup: makes the block's tiles by `make`."""
    for stage in range(ring.num_stages):
        plgpu.barrier_arrive(ring.empty.at[stage])  # The whole ring is free at the start.
    make()


def make_tiles(
    block: Block, pieces: Pieces, folding: Folding, applying: Applying | None = None
) -> None:
    """Makes the totals of tile after tile, and puts what becomes of them into the store's buffers.

    `applying` is an epilogue that takes more than the total. Each tile is handed over before the
    next one is begun; `late` has the other way.
    """
    shared = block.joining

    def make_tile(i: Int, tile: Tile, stage: jax.Array) -> jax.Array:
        del i
        total, stage = folding.total(tile, stage)
        if shared is None:
            hand_over(tile, total)
        else:
            first_row = lax.axis_index(THREAD_AXIS) * pieces.half_rows
            joining.either(
                tile,
                functools.partial(shared.give, tile, total, first_row),
                lambda: hand_over(tile, total),
            )
        return stage

    def hand_over(tile: Tile, total: jax.Array) -> None:
        with jax.named_scope("hand over"):
            if shared is not None:
                shared.await_others(tile)
            if applying is not None:
                applying.begin()
            for index in range(len(pieces.places)):
                _hand_over(block, pieces, tile, index, total, folding, applying)
            if applying is not None:
                applying.end()

    block.for_each_tile(make_tile, jnp.int32(0))


def _hand_over(
    block: Block,
    pieces: Pieces,
    tile: Tile,
    index: int,
    total: jax.Array,
    folding: Folding,
    applying: Applying | None,
) -> None:
    """Puts a piece of this warpgroup's half where the storing warp takes it from."""
    place, buffer = pieces.places[index], index % pieces.num_buffers
    half, epilogue = lax.axis_index(THREAD_AXIS), block.parts.epilogue

    def summed(rows: slice, columns: slice) -> jax.Array:
        piece = total[rows, columns]
        if block.joining is None:
            return piece
        row, column = pieces.within_tile((rows.start, columns.start), half)
        return block.joining.joined_piece(piece, tile, row, column)

    if applying is not None:
        applying.wait_for_buffer(buffer)
        piece = applying.piece(summed, index, half)
    else:
        piece = summed(*pieces.within_half(place))
        if isinstance(folding, Adding):
            piece = folding.add_last(piece, tile, index, half)
        else:
            # The stores of the piece that was in the buffer have read it.
            plgpu.barrier_wait(pieces.free.at[buffer])
        if epilogue is not None:
            piece = epilogue(piece, tile, *pieces.within_tile(place, half))
    _fill(block.parts.sink, pieces, tile, index, half, piece.astype(pieces.out.dtype))
    plgpu.commit_smem()
    # Publishes this half of the piece to the storing warp.
    plgpu.barrier_arrive(pieces.filled.at[buffer])


def _fill(
    sink: Sink, pieces: Pieces, tile: Tile, index: int, half: jax.Array, piece: jax.Array
) -> None:
    """Writes a piece of a half to its buffer."""
    buffer = index % pieces.num_buffers
    if pieces.edge is None:
        pieces.out.at[half, buffer][...] = piece
        return
    edge = pieces.edge.at[half, buffer]
    first, end = pieces.stored_rows(sink, tile, pieces.places[index], half)

    @pl.when(end - first == pieces.rows)
    def _():
        pieces.out.at[half, buffer][...] = piece

    @pl.when(end - first < pieces.rows)
    def _():
        edge[...] = piece
