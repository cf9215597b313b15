"""The issuing warp: has the tensor cores make totals in tensor memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed.kernel import CLUSTER_AXIS, block_in_cluster
from stretto.kernels.engine.blackwell.accumulators import Accumulators
from stretto.kernels.engine.block import Block
from stretto.kernels.engine.parts import Product
from stretto.kernels.engine.ring import Ring


def multiply(block: Block, product: Product, ring: Ring, accumulators: Accumulators) -> None:
    """Issues the products of tile after tile, as stages are filled and accumulators drained.

    Those of a pair of blocks are issued by the first of them.
    """
    if accumulators.config.blocks == 1:
        _multiply(block, product, ring, accumulators, None)
    else:
        pl.when(block_in_cluster() == 0)(
            lambda: _multiply(block, product, ring, accumulators, CLUSTER_AXIS)
        )


def _multiply(
    block: Block, product: Product, ring: Ring, accumulators: Accumulators, pair: str | None
) -> None:
    """`pair` is the axis of the cluster whose blocks multiply together."""
    for stage in range(ring.num_stages):
        # Nothing is under way: the whole ring is free at the start.
        plgpu.tcgen05_commit_arrive(ring.empty.at[stage], collective_axis=pair)

    def tile_loop(i: jax.Array, stage: jax.Array) -> jax.Array:
        half = accumulators.of(i)
        # The draining warpgroups have read the total of the tile that had the accumulator.
        plgpu.barrier_wait(accumulators.drained.at[half])

        def k_loop(k: jax.Array, stage: jax.Array) -> jax.Array:
            # Both copies into the stage are complete.
            plgpu.barrier_wait(ring.full.at[stage])
            lhs, rhs = ring.lhs.at[stage], ring.rhs.at[stage]
            if product.lhs_transposed:
                lhs = lhs.transpose((1, 0))
            if product.rhs_transposed:
                rhs = rhs.transpose((1, 0))
            # Publishes to the loading warps, once done, that the stage has been read.
            plgpu.tcgen05_mma(
                accumulators.whole(half),
                lhs,
                rhs,
                ring.empty.at[stage],
                accumulate=k > 0,
                collective_axis=pair,
            )
            return ring.next(stage)

        with jax.named_scope("multiply"):
            stage = lax.fori_loop(0, block.k_tiles(block.tile(i)), k_loop, stage)
            # Publishes to the draining warpgroups, once all are done, that the total is there.
            plgpu.tcgen05_commit_arrive(accumulators.made.at[half], collective_axis=pair)
        return stage

    lax.fori_loop(0, block.num_tiles, tile_loop, jnp.int32(0))
