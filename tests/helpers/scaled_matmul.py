"""An arithmetic that no kernel has yet: fp8 operands, and a scale for every block of rhs. What is
new is how products are folded, and nothing else."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.kernels.engine import sinks, streams, tiles
from stretto.kernels.engine.block import Block
from stretto.kernels.engine.fuse import Refs, fuse
from stretto.kernels.engine.hopper.matmul import Matmul
from stretto.kernels.engine.hopper.pieces import Pieces
from stretto.kernels.engine.hopper.products import Products
from stretto.kernels.engine.hopper.tile_config import TileConfig
from stretto.kernels.engine.orders import ShardOrder
from stretto.kernels.engine.parts import Fold, Parts, Product, Tile
from stretto.kernels.engine.segments import Segments

# 128 bytes of fp8 are a row of the swizzle.
CONFIG = TileConfig(tile_n=128, tile_k=128, num_stages=4, store_buffers=2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scaled(Fold):
    """Each product is multiplied by `scale(tile, k)` before it is added."""

    scale: Callable[[Tile, jax.Array], jax.Array]


class ScaledMatmul(Matmul):
    """Hopper's main loop, with products that are promoted to a sum in registers."""

    @property
    def registers(self) -> Mapping[type[Fold], tuple[int, int]]:
        return {Scaled: (40, 232)}

    def folding(
        self, block: Block, products: Products, buffers: Pieces, scratch: Mapping[str, Any]
    ) -> Any:
        return _Scaling(block, products)


@dataclasses.dataclass(frozen=True)
class _Scaling:
    block: Block
    products: Products

    def total(self, tile: Tile, stage: jax.Array) -> tuple[jax.Array, jax.Array]:
        ring, fold = self.products.ring, self.block.parts.fold

        def step(k, carry):
            total, stage = carry
            scale = fold.scale(tile, k)

            def multiply(acc):
                self.products.add_stage(acc, stage)
                return acc[...]

            product = pl.run_scoped(multiply, self.products.accumulator())
            ring.release(stage)  # Reading the accumulator has waited for the product.
            return total + product * scale, ring.next(stage)

        zeros = jnp.zeros((self.products.rows, self.products.config.tile_n), jnp.float32)
        start = plgpu.layout_cast(zeros, plgpu.Layout.WGMMA), stage
        return lax.fori_loop(0, self.block.k_tiles(tile), step, start)

    def bring(self, tile: Tile) -> None:
        pass


def scaled_matmul(lhs: jax.Array, rhs: jax.Array, scales: jax.Array) -> jax.Array:
    """`[m, k] @ [n, k].T`, each block of rhs times its scale `[n / 128, k / 128]` -> float32."""
    (m, k), n = lhs.shape, rhs.shape[0]
    order = ShardOrder(m, n, CONFIG)

    def parts(refs: Refs) -> Parts:
        return Parts(
            order=order,
            k_tiles=k // CONFIG.tile_k,
            lhs=streams.of(refs.lhs, lambda tile, k: tiles.lhs_window(CONFIG, tile.m, k)),
            rhs=streams.of(refs.rhs, lambda tile, k: tiles.rhs_window(CONFIG, k, tile.n, True)),
            fold=Scaled(scale=lambda tile, k: refs.scales[tile.n, k]),
            sink=sinks.along_n([refs.out], Segments.of([n], CONFIG.tile_n), CONFIG),
        )

    product = Product(
        lhs=lhs.dtype, rhs=rhs.dtype, out=jnp.float32, rhs_transposed=True, fold=Scaled
    )
    results = fuse(
        parts,
        name="scaled_matmul",
        team=None,
        mainloop=ScaledMatmul(CONFIG, product),
        num_tiles=order.num_tiles,
        operands=dict(lhs=lhs, rhs=rhs, scales=scales),
        outs=dict(out=jax.ShapeDtypeStruct((m, n), jnp.float32)),
    )
    return results["out"]
