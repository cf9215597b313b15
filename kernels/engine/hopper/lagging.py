"""One multiplying warpgroup behind the other at the end of a tile: epilogues beside products.

Both warpgroups multiply at half the rate of the tensor cores, and would end a tile together: then
these idle while both hand over. So the second pauses some stages before the end, while the first
multiplies at the whole rate; it catches up while the first hands over, and the first begins the
next tile while the second does.

| barrier | arrives | waits | count | proves |
|---|---|---|---|---|
| `first_started` | first multiplying warpgroup | second | 1 | it has started all products of the tile |

The first starts all products of the tile after this one only once the second has released a stage
of that tile, and so has passed the barrier: it is never two phases ahead (`Lag.pause`).
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
from stretto.distributed.schedule import Int
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

    def pause(self, k_tiles: Int, num_stages: int) -> int | None:
        """Where in a contraction the second warpgroup pauses; None where it does not.

        It does not where the contraction fits into the ring, or is known in the kernel alone.
        """
        if not isinstance(k_tiles, int) or k_tiles <= num_stages:
            return None
        return k_tiles - self.stages

    def finish(self, products: Products, acc: Ref, pause: int, stage: jax.Array) -> jax.Array:
        """Adds the products from `pause` on to `acc`, and returns the next stage.

        Those before are added (`Products.add`).
        """
        warpgroup, ring = lax.axis_index(THREAD_AXIS), products.ring
        plgpu.wgmma_wait(0)  # All stages before the pause are read, and released.
        ring.release(ring.previous(stage))

        @pl.when(warpgroup == 1)
        def _():
            # The first warpgroup has the tensor cores for itself until its last product.
            plgpu.barrier_wait(self.first_started)

        stage = products.add(acc, pause, pause + self.stages, stage, released=pause)

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
