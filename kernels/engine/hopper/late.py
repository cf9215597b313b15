"""Tiles that are handed over late: under the first products of the next one.

While the multiplying warpgroups hand a tile over, the tensor cores have nothing to do, unless the
next tile's products are under way. Results of 16 bits take half as many registers as the
accumulator, and fit beside it. So they are rounded, the next tile is begun, and its first products
hide the pieces, one each. All pieces under one product would delay the release of its stage, and
with it what is loaded after it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed.kernel import THREAD_AXIS
from stretto.distributed.schedule import Int
from stretto.kernels.engine.block import Block
from stretto.kernels.engine.hopper.adding import Adding
from stretto.kernels.engine.hopper.folding import Folding
from stretto.kernels.engine.hopper.pieces import Pieces
from stretto.kernels.engine.parts import Addends, Product, Tile


def is_possible(product: Product, block: Block, pieces: Pieces) -> bool:
    """Whether tiles of such products can be handed over late, and are.

    Registers hold a whole tile of results beside the accumulator, every tile has products, no block
    gives any to another, and addends, which come through the store's buffers, have room there for a
    whole tile. It is done in 8 bits alone, where the products of a tile take half as long.
    """
    in_16_bits = jnp.dtype(product.out).itemsize == 2
    of_8_bits = jnp.dtype(product.lhs).itemsize == 1 and product.scales in (None, "row")
    is_plain = product.beside is None and not product.ragged and block.joining is None
    fits = product.fold is not Addends or pieces.num_buffers == len(pieces.places)
    has_products = isinstance(block.parts.k_tiles, int)
    return of_8_bits and in_16_bits and is_plain and fits and has_products


def make_tiles(block: Block, pieces: Pieces, folding: Folding) -> None:
    """Called in each multiplying warpgroup: makes tile after tile, and hands each over late."""
    indices = range(len(pieces.places))
    shares = _shares(pieces, _products(block))

    def make_tile(i: Int, tile: Tile, carry: Any) -> Any:
        stage, before = carry

        def hand_before_over(share: Sequence[int]) -> None:
            if share:
                pl.when(i > 0)(lambda: _hand_over(pieces, folding, before, share))

        under = [functools.partial(hand_before_over, share) for share in shares]
        total, stage = folding.total(tile, stage, under)
        with jax.named_scope("round"):
            return stage, tuple(_result(block, pieces, tile, i, total, folding) for i in indices)

    nothing = jnp.zeros((pieces.rows, pieces.columns), pieces.out.dtype)
    nothing = plgpu.layout_cast(nothing, plgpu.Layout.WGMMA)
    start = jnp.int32(0), tuple(nothing for _ in indices)
    _, last = block.for_each_tile(make_tile, start)
    pl.when(block.num_tiles > 0)(lambda: _hand_over(pieces, folding, last, indices))


def _products(block: Block) -> int:
    """The products of every tile. Addends of scaled products come after all of them."""
    k_tiles = block.parts.k_tiles
    if not isinstance(k_tiles, int):
        raise ValueError("tiles are handed over late only if all have products, equally many.")
    return k_tiles


def _shares(pieces: Pieces, products: int) -> list[list[int]]:
    """The pieces that are handed over under each of the first of so many products.

    A single buffer has been stored from after two products.
    """
    gap = 2 if pieces.num_buffers == 1 else 1
    at = [min(gap * index, products - 1) for index in range(len(pieces.places))]
    return [[index for index, k in enumerate(at) if k == share] for share in range(at[-1] + 1)]


def _result(
    block: Block, pieces: Pieces, tile: Tile, index: int, total: jax.Array, folding: Folding
) -> jax.Array:
    """The piece of the result at `index`, of this warpgroup's `total`, in the result's type."""
    place, half = pieces.places[index], lax.axis_index(THREAD_AXIS)
    piece = total[pieces.within_half(place)]
    if isinstance(folding, Adding):
        piece = folding.add_last(piece, tile, index, half)
    if block.parts.epilogue is not None:
        piece = block.parts.epilogue(piece, tile, *pieces.within_tile(place, half))
    return piece.astype(pieces.out.dtype)


def _hand_over(
    pieces: Pieces, folding: Folding, results: Sequence[jax.Array], indices: Sequence[int]
) -> None:
    """Puts some of a tile's results where the storing warp takes them from."""
    half = lax.axis_index(THREAD_AXIS)
    with jax.named_scope("hand over"):
        for index in indices:
            buffer = index % pieces.num_buffers
            if not isinstance(folding, Adding):  # `add_last` has waited.
                # The stores of the piece that was in the buffer have read it.
                plgpu.barrier_wait(pieces.free.at[buffer])
            pieces.out.at[half, buffer][...] = results[index]
            plgpu.commit_smem()
            # Publishes this half of the piece to the storing warp.
            plgpu.barrier_arrive(pieces.filled.at[buffer])
