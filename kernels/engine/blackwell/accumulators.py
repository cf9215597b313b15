"""The accumulators in tensor memory, which tiles take in turn, or products with scales of blocks.

| barrier | arrives | waits | proves |
|---|---|---|---|
| `made[half]` | the tensor cores | draining warpgroup | it holds a tile's total, or a product |
| `drained[half]` | draining warpgroups | issuing warp | the accumulator has been read |

Of a tile that a pair of blocks makes each has its rows in its own tensor memory. The first one's
warp issues the products of both, and waits for both to have drained; both learn that they are made.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed.kernel import CLUSTER_AXIS
from stretto.distributed.schedule import Int, rem
from stretto.kernels.engine.blackwell.tile_config import ACCUMULATORS, LANES, TileConfig
from stretto.kernels.engine.parts import Ref


@dataclasses.dataclass(frozen=True, kw_only=True)
class Accumulators:
    """`totals` `[128, 2 * tile_n]` in tensor memory, and the barriers."""

    config: TileConfig
    totals: Ref
    made: Ref
    drained: Ref

    def of(self, i: Int) -> Int:
        """The accumulator that the block's `i`-th tile takes."""
        return rem(i, ACCUMULATORS)

    def next(self, half: jax.Array) -> jax.Array:
        """The accumulator that is taken after `half`."""
        return ACCUMULATORS - 1 - half

    def free(self) -> None:
        """Called in the draining warpgroup, once: both are free at the start."""
        for half in range(ACCUMULATORS):
            plgpu.barrier_arrive(self.drained.at[half])

    def pieces(self, k_tiles: Int, half: Int, places: range) -> Iterator[jax.Array]:
        """The pieces of a tile's total, of columns at `places`; `k_tiles` made it."""
        # The tensor cores have made the total.
        plgpu.barrier_wait(self.made.at[half])
        if not isinstance(k_tiles, int):  # A tile without a contraction has had no product.
            pl.when(k_tiles == 0)(lambda: self.clear(half, places.step))
        yield from self.take(half, places)

    def take(self, half: Int, places: range) -> Iterator[jax.Array]:
        """What an accumulator holds, piece by piece; it is free after the last one."""
        for column in places:
            piece = self.load(half, column, places.step)
            if column == places[-1]:
                # Publishes to the issuing warp that all of the accumulator has been read.
                plgpu.barrier_arrive(self.drained.at[half])
            yield piece

    def columns(self, half: Int, first: int, count: int) -> Ref:
        """Some columns of an accumulator."""
        return self.totals.at[:, pl.ds(half * self.config.tile_n + first, count)]

    def whole(self, half: Int) -> Ref:
        """All columns of an accumulator."""
        return self.columns(half, 0, self.config.tile_n)

    def load(self, half: Int, first: int, count: int) -> jax.Array:
        """Some columns, float32; they have been read when it returns."""
        piece = plgpu.async_load_tmem(self.columns(half, first, count))
        plgpu.wait_load_tmem()
        return piece

    def clear(self, half: Int, columns: int) -> None:
        """Fills an accumulator with zeros, so many columns at a time."""
        zeros = plgpu.layout_cast(jnp.zeros((LANES, columns), jnp.float32), plgpu.Layout.TCGEN05)
        for first in range(0, self.config.tile_n, columns):
            plgpu.async_store_tmem(self.columns(half, first, columns), zeros)
        plgpu.commit_tmem()


def scratch(config: TileConfig) -> dict[str, Any]:
    """Tensor memory and barriers, by name, for `kernel.launch`."""

    options: dict[str, Any] = dict(num_barriers=ACCUMULATORS, orders_tensor_core=True)
    paired = config.blocks > 1
    drained = plgpu.Barrier(**options)
    if paired:  # Both arrive at the first block's barrier.
        drained = plgpu.ClusterBarrier(
            collective_axes=(CLUSTER_AXIS,), leader_tracked=True, **options
        )
    return dict(
        totals=plgpu.TMEM((LANES, ACCUMULATORS * config.tile_n), jnp.float32, collective=paired),
        made=plgpu.Barrier(**options),
        drained=drained,
    )
