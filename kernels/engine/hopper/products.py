"""Products of the ring's stages, by the tensor cores of one multiplying warpgroup."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed.kernel import THREAD_AXIS, block_in_cluster
from stretto.distributed.private_jax.column_tiles import side_by_side
from stretto.distributed.schedule import Int
from stretto.kernels.engine.hopper.tile_config import TileConfig
from stretto.kernels.engine.parts import Product, Ref
from stretto.kernels.engine.ring import Ring


def first_row(config: TileConfig) -> Int:
    """The first row of a tile that the block that runs this code makes."""
    return 0 if config.blocks == 1 else block_in_cluster() * config.rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Products:
    """A warpgroup's share of a tile's products: of its rows of lhs and all columns of rhs."""

    config: TileConfig
    product: Product
    ring: Ring

    @property
    def rows(self) -> int:
        """Rows of a tile that a warpgroup makes."""
        return self.config.rows // self.config.warpgroups

    @property
    def first_row(self) -> jax.Array:
        """The first of them, among the block's."""
        return lax.axis_index(THREAD_AXIS) * self.rows

    def accumulator(self) -> Any:
        """Registers for a warpgroup's share of a tile, zero at first, for `pl.run_scoped`."""
        return plgpu.WGMMAAccumulatorRef((self.rows, self.config.tile_n), jnp.float32)

    def add(
        self,
        acc: Ref,
        first: Int,
        last: Int,
        stage: jax.Array,
        under: Sequence[Callable[[], None]] = (),
    ) -> jax.Array:
        """Adds tiles `first` to `last` along the contraction to `acc`; returns the next stage.

        It releases each stage but the last of a tile, which `release_last` does. `under[k]` is
        called while the tensor cores make product `k` of a tile: `first` is 0 then, and `last` no
        less than there are such functions.
        """

        def step(k: jax.Array, stage: jax.Array) -> jax.Array:
            self.add_stage(acc, stage)
            plgpu.wgmma_wait(1)  # All but the newest product is done, so the stage before is read.
            pl.when(k > 0)(lambda: self.ring.release(self.ring.previous(stage)))
            return self.ring.next(stage)

        with jax.named_scope("multiply"):
            for k, act in enumerate(under):
                self.add_stage(acc, stage)
                if k:
                    plgpu.wgmma_wait(1)  # As in `step`.
                    self.ring.release(self.ring.previous(stage))
                act()
                first, stage = k + 1, self.ring.next(stage)
            return lax.fori_loop(first, last, step, stage)

    def add_stage(self, acc: Ref, stage: jax.Array) -> None:
        """Starts to add the product of one stage to `acc`."""
        # Both copies into the stage are complete.
        plgpu.barrier_wait(self.ring.full.at[stage])
        self.multiply(acc, stage, 0, self.rows)

    def multiply(self, acc: Ref, stage: jax.Array, row: int, rows: int) -> None:
        """Starts to add `rows` rows of the product of a full stage, from its `row` on, to `acc`."""
        own_rows = pl.ds(self.first_row + row, rows)
        rhs = self.ring.rhs.at[stage]
        if self.product.rhs_transposed:
            rhs = rhs.transpose((1, 0))
        elif len(rhs.shape) > 2:
            rhs = side_by_side(rhs)
        if self.product.lhs_transposed:
            lhs = self.ring.lhs.at[stage, :, own_rows].transpose((1, 0))
        else:
            lhs = self.ring.lhs.at[stage, own_rows]
        plgpu.wgmma(acc, lhs, rhs)

    def release_last(self, k_tiles: Int, stage: jax.Array) -> None:
        """Releases the last stage of a tile, once `acc` has been read; `stage` is the next one."""
        if isinstance(k_tiles, int):
            self.ring.release(self.ring.previous(stage))
        else:  # Of a tile without products there is none.
            pl.when(k_tiles > 0)(lambda: self.ring.release(self.ring.previous(stage)))
