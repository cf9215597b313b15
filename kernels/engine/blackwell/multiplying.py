"""The issuing warp: has the tensor cores make totals in tensor memory."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed.kernel import CLUSTER_AXIS, block_in_cluster
from stretto.distributed.schedule import Int
from stretto.kernels.engine.blackwell.accumulators import Accumulators
from stretto.kernels.engine.blackwell.mx import MxScales
from stretto.kernels.engine.block import Block
from stretto.kernels.engine.parts import Product
from stretto.kernels.engine.ring import Ring

type Carry = tuple[jax.Array, jax.Array]


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
    issuing = Issuing(product, ring, accumulators, pair)
    issue = issuing.products if product.scales == "block" else issuing.total

    def tile_loop(i: jax.Array, carry: Carry) -> Carry:
        with jax.named_scope("multiply"):
            return issue(i, block.k_tiles(block.tile(i)), carry)

    lax.fori_loop(0, block.num_tiles, tile_loop, (jnp.int32(0), jnp.int32(0)))


@dataclasses.dataclass(frozen=True)
class Issuing:
    """What the issuing warp does for a tile; `pair` as of `_multiply`.

    Carried on are the stage, and the accumulator of the next product if each has its own.
    """

    product: Product
    ring: Ring
    accumulators: Accumulators
    pair: str | None

    def total(self, i: jax.Array, k_tiles: Int, carry: Carry) -> Carry:
        """All products of the block's `i`-th tile add up in one accumulator."""
        stage, unused = carry
        half = self.accumulators.of(i)
        self._wait_until_drained(half)

        def k_loop(k: jax.Array, stage: jax.Array) -> jax.Array:
            self._issue(half, stage, accumulate=k > 0)
            return self.ring.next(stage)

        stage = lax.fori_loop(0, k_tiles, k_loop, stage)
        self._commit(half)
        return stage, unused

    def products(self, i: jax.Array, k_tiles: Int, carry: Carry) -> Carry:
        """Each product of a tile has an accumulator of its own, in turn."""
        del i

        def k_loop(_: jax.Array, carry: Carry) -> Carry:
            stage, half = carry
            self._wait_until_drained(half)
            self._issue(half, stage, accumulate=False)
            self._commit(half)
            return self.ring.next(stage), self.accumulators.next(half)

        return lax.fori_loop(0, k_tiles, k_loop, carry)

    def _wait_until_drained(self, half: Int) -> None:
        # The draining warpgroups have read what the accumulator held.
        plgpu.barrier_wait(self.accumulators.drained.at[half])

    def _issue(self, half: Int, stage: jax.Array, *, accumulate: Any) -> None:
        """Starts the product of a stage."""
        # All copies into the stage are complete.
        plgpu.barrier_wait(self.ring.full.at[stage])
        lhs, rhs = self.ring.lhs.at[stage], self.ring.rhs.at[stage]
        if self.product.lhs_transposed:
            lhs = lhs.transpose((1, 0))
        if self.product.rhs_transposed:
            rhs = rhs.transpose((1, 0))
        scales = self.ring.scales
        of_blocks = {}
        if isinstance(scales, MxScales):
            of_blocks = scales.in_tensor_memory(stage, self.pair)
        # Publishes to the loading warps, once done, that the stage has been read.
        plgpu.tcgen05_mma(
            self.accumulators.whole(half),
            lhs,
            rhs,
            self.ring.empty.at[stage],
            accumulate=accumulate,
            collective_axis=self.pair,
            **of_blocks,
        )

    def _commit(self, half: Int) -> None:
        # Publishes to the draining warpgroups, once all are done, that the accumulator is full.
        plgpu.tcgen05_commit_arrive(self.accumulators.made.at[half], collective_axis=self.pair)
