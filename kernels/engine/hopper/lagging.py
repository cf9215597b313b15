"""One multiplying warpgroup behind the other at the end of a tile: epilogues beside products.

Both warpgroups multiply at half the rate of the tensor cores, and would end a tile together: then
these idle while both hand over. So the second pauses some stages before the end, while the first
multiplies at the whole rate; it catches up while the first hands over, and the first begins the
next tile while the second does.

| barrier | arrives | waits | count | proves |
|---|---|---|---|---|
| `first_started` | first multiplying warpgroup | second | 1 | it has started all products of the tile |

The first starts all products of the tile after this one only once the second has released a stage
of that tile, and so has passed the barrier: it is never two phases ahead (`Lag.suits`).
"""  # noqa: E501

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed.kernel import THREAD_AXIS
from stretto.kernels.engine.hopper.products import Products
from stretto.kernels.engine.hopper.tile_config import TileConfig
from stretto.kernels.engine.parts import Ref
from stretto.kernels.problem import trials


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lag:
    """The pause of the second warpgroup.

    Attributes:
      stages: of the ring that are left where it pauses.
      first_started: the barrier.
    """

    stages: int
    first_started: Ref

    def suits(self, k_tiles: int, num_stages: int) -> bool:
        """Whether a tile's contraction does not fit into the ring."""
        return k_tiles > num_stages

    def add(self, products: Products, acc: Ref, k_tiles: int, stage: jax.Array) -> jax.Array:
        """Adds a tile's products to `acc`, and returns the next stage (`Products.add`)."""
        warpgroup, ring = lax.axis_index(THREAD_AXIS), products.ring
        pause = k_tiles - self.stages
        stage = products.add(acc, 0, pause, stage)
        plgpu.wgmma_wait(0)  # All stages before the pause are read, and released.
        ring.release(ring.previous(stage))

        @pl.when(warpgroup == 1)
        def _():
            # The first warpgroup has the tensor cores for itself until its last product.
            plgpu.barrier_wait(self.first_started)

        stage = products.add(acc, pause, k_tiles, stage, released=pause)

        @pl.when(warpgroup == 0)
        def _():
            # Lets the second warpgroup catch up.
            plgpu.barrier_arrive(self.first_started)

        return stage


def scratch(config: TileConfig) -> dict[str, Any]:
    """The barrier, by name, for `kernel.launch`; none without a lag."""
    return dict(first_started=plgpu.Barrier(num_arrivals=1)) if _stages(config) else {}


def lag(config: TileConfig, scratch: Mapping[str, Ref]) -> Lag | None:
    """The lag that is asked for, with the ref of `scratch`; None without."""
    stages = _stages(config)
    return Lag(stages=stages, first_started=scratch["first_started"]) if stages else None


def _stages(config: TileConfig) -> int:
    """At most the ring's, and of two warpgroups."""
    return min(trials.current().lag, config.num_stages) if config.warpgroups == 2 else 0
