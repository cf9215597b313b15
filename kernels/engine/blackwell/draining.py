"""The draining warpgroup: takes totals out of tensor memory, and hands them over in pieces."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed.schedule import Int
from stretto.kernels.engine.blackwell.accumulators import Accumulators
from stretto.kernels.engine.blackwell.adding import Adding
from stretto.kernels.engine.blackwell.pieces import Pieces
from stretto.kernels.engine.block import Block
from stretto.kernels.engine.parts import Tile


class Totals(Protocol):
    """Makes the totals of tiles out of what the accumulators hold (`scaling` has others)."""

    def begin(self) -> None:
        """Called once, first: frees what the other warps wait for."""
        ...

    def start(self) -> Any:
        """What is remembered from tile to tile, at first."""
        ...

    def of_tile(self, i: Int, tile: Tile, carry: Any, /) -> tuple[Iterator[jax.Array], Any]:
        """The pieces of the block's `i`-th tile, in the order of their stores; and the carry.

        It waits for each accumulator that the tile takes, and releases each once.
        """
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summed:
    """An accumulator holds a tile's total."""

    block: Block
    accumulators: Accumulators
    pieces: Pieces

    def begin(self) -> None:
        """Frees the accumulators."""
        self.accumulators.free()

    def start(self) -> None:
        """Nothing is remembered from tile to tile."""

    def of_tile(self, i: Int, tile: Tile, carry: None) -> tuple[Iterator[jax.Array], None]:
        """The pieces of the accumulator that the tile has."""
        half = self.accumulators.of(i)
        return self.accumulators.pieces(self.block.k_tiles(tile), half, self.pieces.places), carry


def drain(block: Block, totals: Totals, pieces: Pieces, adding: Adding | None) -> None:
    """Puts what becomes of the totals of tile after tile into the buffers of the store."""
    totals.begin()
    if adding is not None:
        adding.free_buffers()

    def tile_loop(i: jax.Array, state: Any) -> Any:
        turn, carry = state
        tile = block.tile(i)
        of_tile, carry = totals.of_tile(i, tile, carry)
        with jax.named_scope("drain"):
            for index, (column, piece) in enumerate(zip(pieces.places, of_tile, strict=True)):
                if adding is not None:
                    piece, turn = adding.add(piece, tile, turn)
                _hand_over(block, pieces, tile, index, column, piece)
        return turn, carry

    lax.fori_loop(0, block.num_tiles, tile_loop, (jnp.int32(0), totals.start()))


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
