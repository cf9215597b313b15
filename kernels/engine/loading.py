"""The loading warp: keeps the ring full."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed.schedule import Int
from stretto.kernels.engine.block import Block
from stretto.kernels.engine.gates import Gates
from stretto.kernels.engine.parts import Tile
from stretto.kernels.engine.ring import Ring


def load(
    block: Block,
    gates: Gates | None,
    ring: Ring,
    of_tile: Callable[[Int, Tile], None] | None = None,
    of_stage: Callable[[Tile, jax.Array], None] | None = None,
) -> None:
    """Loads the operands of one tile after another, as stages become free and operands arrive.

    `of_tile` is called with (number of the block's tile, tile) after its loads: what else this warp
    loads for it. And `of_stage` with (tile, number along the contraction) after each stage's loads.
    """
    if gates is not None:
        gates.free_slots()
    parts = block.parts

    def load_tile(i: Int, tile: Tile, stage: jax.Array) -> jax.Array:
        first = 0 if tile.part is None else tile.part.first

        def k_loop(k: jax.Array, stage: jax.Array) -> jax.Array:
            # The products have read what the stage held.
            plgpu.barrier_wait(ring.empty.at[stage])
            if gates is not None:
                gates.go_through(i, k, tile.part)
            # Each copy, once complete, publishes its tile to the warps that multiply.
            lhs, rhs = ring.arrivals(stage)
            parts.lhs.load(tile, k, ring.loaded_lhs.at[stage], lhs)
            parts.rhs.load(tile, k, ring.loaded_rhs.at[stage], rhs)
            if parts.scales is not None and ring.scales is not None:
                ring.scales.load(parts.scales, tile, k, stage)
            if of_stage is not None:
                of_stage(tile, k)
            return ring.next(stage)

        with jax.named_scope("load"):
            stage = lax.fori_loop(first, first + block.k_tiles(tile), k_loop, stage)
        if of_tile is not None:
            of_tile(i, tile)
        return stage

    block.for_each_tile(load_tile, jnp.int32(0))
    ring.close()
