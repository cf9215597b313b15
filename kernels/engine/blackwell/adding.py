"""`parts.Addends` on Blackwell: addends come into the sum as it is drained.

| barrier | arrives | waits | proves |
|---|---|---|---|
| `loaded[buffer]` | the copy into it | draining warpgroup | the buffer holds a piece of an addend |
| `added[buffer]` | draining warpgroup | bringing warp | it has been added |

A warp of their own brings them, piece after piece, and of each piece addend after addend.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed.schedule import rem
from stretto.kernels.engine.blackwell.pieces import Pieces
from stretto.kernels.engine.blackwell.tile_config import ADDEND_BUFFERS, LANES
from stretto.kernels.engine.block import Block
from stretto.kernels.engine.parts import Addends, Product, Ref, Tile
from stretto.kernels.engine.shared_memory import row_elements, swizzled


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adding:
    """The addends of a block's tiles; `buffers` `[2, rows, columns]` hold a piece each."""

    block: Block
    pieces: Pieces
    addends: Addends
    buffers: Ref
    loaded: Ref
    added: Ref

    def free_buffers(self) -> None:
        """Called in the draining warpgroup, once: all buffers are free at the start."""
        for buffer in range(ADDEND_BUFFERS):
            plgpu.barrier_arrive(self.added.at[buffer])

    def add(self, piece: jax.Array, tile: Tile, turn: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Called in the draining warpgroup: the piece with its addends, and the next turn.

        `turn` counts the pieces of addends that it has taken.
        """

        def add_one(_: jax.Array, carry: tuple) -> tuple:
            total, turn = carry
            buffer = rem(turn, ADDEND_BUFFERS)
            # The copy into the buffer is complete.
            plgpu.barrier_wait(self.loaded.at[buffer])
            addend = plgpu.load(self.buffers.at[buffer], layout=plgpu.Layout.TCGEN05)
            total = total + addend.astype(jnp.float32)
            plgpu.commit_smem()  # It has been read before the copy engine writes the next one.
            # Publishes to the bringing warp that the buffer has been read.
            plgpu.barrier_arrive(self.added.at[buffer])
            return total, turn + 1

        with jax.named_scope("add"):
            return lax.fori_loop(0, self.addends.count(tile), add_one, (piece, turn))

    def bring(self) -> None:
        """The bringing warp: copies pieces of addends into the buffers, as they come free."""
        addends, pieces = self.addends, self.pieces
        columns = pieces.columns

        def tile_loop(i: jax.Array, turn: jax.Array) -> jax.Array:
            tile = self.block.tile(i)
            count = addends.count(tile)
            pl.when(count > 0)(lambda: addends.wait(tile))
            for column in pieces.places:

                def bring_one(number: jax.Array, turn: jax.Array, column: int = column) -> Any:
                    buffer = rem(turn, ADDEND_BUFFERS)
                    # What was in the buffer has been added.
                    plgpu.barrier_wait(self.added.at[buffer])
                    window = addends.window(tile, number, pieces.row, LANES, column, columns)
                    # Publishes the piece, once complete, to the draining warpgroup.
                    plgpu.copy_gmem_to_smem(window, self.buffers.at[buffer], self.loaded.at[buffer])
                    return turn + 1

                turn = lax.fori_loop(0, count, bring_one, turn)
            return turn

        with jax.named_scope("bring addends"):
            lax.fori_loop(0, self.block.num_tiles, tile_loop, jnp.int32(0))


def scratch(product: Product) -> dict[str, Any]:
    """The buffers and their barriers, by name, for `kernel.launch`."""
    shape = ADDEND_BUFFERS, LANES, row_elements(product.out)
    return dict(
        addend_smem=plgpu.SMEM(shape, product.out, transforms=swizzled(product.out)),
        loaded=plgpu.Barrier(num_barriers=ADDEND_BUFFERS),
        added=plgpu.Barrier(num_barriers=ADDEND_BUFFERS),
    )
