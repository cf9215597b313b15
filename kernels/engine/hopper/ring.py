"""The ring of stages in shared memory that tiles of lhs and rhs are loaded into.

| barrier | arrives | waits | count | proves |
|---|---|---|---|---|
| `full[stage]` | both copies into it | multiplying warpgroups | 2 | the stage holds a tile of lhs and of rhs |
| `empty[stage]` | multiplying warpgroups | loading warp | 2 | the stage may be overwritten |
"""  # noqa: E501

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.kernels.engine.hopper.tile_config import MULTIPLYING_WARPGROUPS, TileConfig
from stretto.kernels.engine.parts import Product, Ref
from stretto.kernels.engine.shared_memory import swizzled


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ring:
    """The stages: `lhs` `[stages, tile_m, tile_k]` or transposed, `rhs` likewise, and barriers."""

    lhs: Ref
    rhs: Ref
    full: Ref
    empty: Ref

    @property
    def num_stages(self) -> int:
        """How many there are."""
        return self.lhs.shape[0]

    def next(self, stage: jax.Array) -> jax.Array:
        """The stage that is filled after `stage`."""
        following = stage + 1
        return lax.select(following == self.num_stages, jnp.int32(0), following)

    def previous(self, stage: jax.Array) -> jax.Array:
        """The stage that was filled before `stage`."""
        return lax.select(stage == 0, jnp.int32(self.num_stages - 1), stage - 1)

    def release(self, stage: jax.Array) -> None:
        """Publishes to the loading warp that this warpgroup's products have read the stage."""
        plgpu.barrier_arrive(self.empty.at[stage])


def scratch(config: TileConfig, product: Product) -> dict[str, Any]:
    """The ring's memory and barriers, by name, for `kernel.launch`."""
    stages = config.num_stages
    lhs_tile, rhs_tile = (config.tile_m, config.tile_k), (config.tile_k, config.tile_n)
    if product.lhs_transposed:
        lhs_tile = lhs_tile[::-1]
    if product.rhs_transposed:
        rhs_tile = rhs_tile[::-1]
    return dict(
        lhs_smem=plgpu.SMEM((stages, *lhs_tile), product.lhs, transforms=swizzled(product.lhs)),
        rhs_smem=plgpu.SMEM((stages, *rhs_tile), product.rhs, transforms=swizzled(product.rhs)),
        full=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        empty=plgpu.Barrier(num_arrivals=MULTIPLYING_WARPGROUPS, num_barriers=stages),
    )
