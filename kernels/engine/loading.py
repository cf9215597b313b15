"""The loading warp: keeps the ring full."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.kernels.engine.block import Block
from stretto.kernels.engine.gates import Gates
from stretto.kernels.engine.ring import Ring


def load(block: Block, gates: Gates | None, ring: Ring) -> None:
    """Loads the operands of tile after tile, as stages come free and operands arrive."""
    if gates is not None:
        gates.free_slots()
    parts = block.parts

    def tile_loop(i: jax.Array, stage: jax.Array) -> jax.Array:
        tile = block.tile(i)

        def k_loop(k: jax.Array, stage: jax.Array) -> jax.Array:
            # The products have read what the stage held.
            plgpu.barrier_wait(ring.empty.at[stage])
            if gates is not None:
                gates.go_through(i, k)
            # Each copy, once complete, publishes its tile to whoever multiplies.
            lhs, rhs = ring.arrivals(stage)
            parts.lhs.load(tile, k, ring.lhs.at[stage], lhs)
            parts.rhs.load(tile, k, ring.rhs.at[stage], rhs)
            return ring.next(stage)

        with jax.named_scope("load"):
            return lax.fori_loop(0, block.k_tiles(tile), k_loop, stage)

    lax.fori_loop(0, block.num_tiles, tile_loop, jnp.int32(0))
