"""Scales that the tensor cores of Blackwell apply: powers of two, one for 32 elements.

A stage of the ring holds its scales in the arrangement that the tensor cores require
(`engine.scales`), under the stage's barriers. The issuing warp starts their copy to tensor memory
before the product; the tensor cores execute both in that order. Each stage has its own columns in
tensor memory, which are overwritten only after its product is finished (barrier `empty`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed.schedule import Int
from stretto.kernels.engine.blackwell.tile_config import LANES, TileConfig
from stretto.kernels.engine.parts import Product, Ref, Scales, Tile
from stretto.kernels.engine.scales import MX_TILE
from stretto.kernels.engine.stages import Halves
from stretto.kernels.problem.scales import BLOCK, MX_BLOCK

OF_A_ROW = BLOCK // MX_BLOCK  # scales of a row in a stage


@dataclasses.dataclass(frozen=True, kw_only=True)
class MxScales:
    """`ring.StageScales`: `lhs` and `rhs` `[stages, rows / 128, 1, 32, 16]` in shared memory.

    `lhs_tensor` and `rhs_tensor` `[128, 4 * stages]` are in tensor memory.
    """

    config: TileConfig
    lhs: Ref
    rhs: Ref
    lhs_tensor: Ref
    rhs_tensor: Ref
    full: Ref

    def load(self, scales: Scales, tile: Tile, k: Int, stage: jax.Array) -> None:
        """Starts the copies: of a pair each block gets its rows' scales, and all columns'."""
        full = self.full.at[stage]
        alone = self.config.blocks == 1
        # Each copy, once complete, publishes its scales to the issuing warp.
        scales.lhs(tile, k, self.lhs.at[stage], full if alone else Halves(full, 0))
        scales.rhs(tile, k, self.rhs.at[stage], full if alone else Halves(full, None))

    def in_tensor_memory(self, stage: jax.Array, pair: str | None) -> dict[str, Ref]:
        """Called in the issuing warp, of a full stage: what `plgpu.tcgen05_mma` takes."""
        columns = pl.ds(stage * OF_A_ROW, OF_A_ROW)
        lhs, rhs = self.lhs_tensor.at[:, columns], self.rhs_tensor.at[:, columns]
        plgpu.async_copy_scales_to_tmem(self.lhs.at[stage], lhs, collective_axis=pair)
        plgpu.async_copy_scales_to_tmem(self.rhs.at[stage], rhs, collective_axis=pair)
        return dict(a_scale=lhs, b_scale=rhs)


def of(config: TileConfig, scratch: Mapping[str, Ref]) -> MxScales:
    """Those whose memory `scratch` has made."""
    return MxScales(
        config=config,
        lhs=scratch["lhs_scales_smem"],
        rhs=scratch["rhs_scales_smem"],
        lhs_tensor=scratch["lhs_scales_tmem"],
        rhs_tensor=scratch["rhs_scales_tmem"],
        full=scratch["full"],
    )


def scratch(config: TileConfig, product: Product) -> dict[str, Any]:
    """Shared and tensor memory, by name, for `kernel.launch`."""
    if product.scales != "mx":
        return {}
    stages, dtype = config.num_stages, jnp.float8_e8m0fnu
    tensor = plgpu.TMEM(
        (LANES, OF_A_ROW * stages),
        dtype,
        layout=plgpu.TMEMLayout.SCALES_LAYOUT,
        collective=config.blocks > 1,
    )
    smem = plgpu.SMEM((stages, 1, 1, *MX_TILE), dtype)
    return dict(
        lhs_scales_smem=smem, rhs_scales_smem=smem, lhs_scales_tmem=tensor, rhs_scales_tmem=tensor
    )
