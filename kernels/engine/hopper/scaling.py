"""Products of operands in 8 bits, times their scales (`parts.Scales`).

| granularity | where the scales are applied | why |
|---|---|---|
| "row" | to the total of a tile, once it is made | a row and a column have one scale each |
| "block" | to the product of each tile along the contraction, which is 128 wide | so wide is a block |

Tensor cores of Hopper add up products of 8 bits with fewer bits than float32 has. With "row" they do
so along the whole contraction, as cuBLAS's "fast accumulation" does; with "block" over 128 products,
and all else is added in float32.

The scales of blocks come with the stages of the ring, under its barriers. Those of rows and columns
come once a tile:

| barrier | arrives | waits | count | proves |
|---|---|---|---|---|
| `scales_full` | the copies | multiplying warpgroups | 2, of a pair of products 3 | the scales of the tile's rows and columns are there |
| `scales_empty` | multiplying warpgroups | loading warp | 2 | they have read them |

They are loaded after the tile's last stage: the tile before has been handed over by then, so the
loading warp does not wait, and they are there before the products of the last stages are done.
"""  # noqa: E501

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed.schedule import Int
from stretto.kernels.engine.block import Block
from stretto.kernels.engine.hopper.folding import Summing
from stretto.kernels.engine.hopper.products import Products
from stretto.kernels.engine.hopper.tile_config import TileConfig
from stretto.kernels.engine.parts import Product, Ref, Scales, Tile
from stretto.kernels.engine.ring import RingScales

ROWS = 64  # that tensor cores multiply at once
COLUMNS = 64  # whose scales are in registers at once


@dataclasses.dataclass(frozen=True, kw_only=True)
class TileScales:
    """Scales of a block's rows of a tile and of all its columns, and their barriers."""

    rows: Ref
    columns: Ref
    full: Ref
    empty: Ref

    def load(self, scales: Scales, i: Int, tile: Tile) -> None:
        """Called in the loading warp, after the stages of the block's `i`-th tile."""
        self.wait_until_read(i)
        # Each copy, once complete, publishes its scales to the multiplying warpgroups.
        scales.lhs(tile, jnp.int32(0), self.rows, self.full)
        scales.rhs(tile, jnp.int32(0), self.columns, self.full)

    def wait_until_read(self, i: Int) -> None:
        """Returns once both multiplying warpgroups have read the scales of the tile before."""
        pl.when(i > 0)(lambda: plgpu.barrier_wait(self.empty))

    def wait(self) -> None:
        """Called in the multiplying warpgroups: returns once the tile's scales are there."""
        plgpu.barrier_wait(self.full)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaledByTile:
    """`folding.Folding`: the sum of products, times a scale for each row and each column."""

    block: Block
    products: Products
    scales: TileScales

    def total(
        self, tile: Tile, stage: jax.Array, under: Sequence[Callable[[], None]] = ()
    ) -> tuple[jax.Array, jax.Array]:
        """The scaled sum of the tile's products, in this warpgroup's rows; and the next stage."""
        plain = Summing(block=self.block, products=self.products)
        total, stage = plain.total(tile, stage, under)
        self.scales.wait()
        with jax.named_scope("scale"):
            total = self._scaled(total)
        # Publishes to the loading warp that this warpgroup has read them.
        plgpu.barrier_arrive(self.scales.empty)
        return total, stage

    def _scaled(self, total: jax.Array) -> jax.Array:
        """`total`, in pieces of as few rows and columns as keep their scales in registers."""
        height, width = total.shape
        down, across = range(0, height, ROWS), range(0, width, COLUMNS)
        pieces = []
        for row, column in itertools.product(down, across):
            piece = total[row : row + ROWS, column : column + COLUMNS]
            rows = _of_rows(self.scales.rows, self.products.first_row + row)
            columns = plgpu.load(
                self.scales.columns.at[pl.ds(column, COLUMNS)],
                layout=plgpu.Layout.WGMMA.reduce(0),
                optimized=False,
            )
            by_row = piece * _over_columns(rows, COLUMNS)
            pieces.append(by_row * lax.broadcast_in_dim(columns, piece.shape, (1,)))
        return _joined(pieces, len(across))

    def bring(self, tile: Tile) -> None:
        """Nothing is needed of the storing warp."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaledByStage:
    """`folding.Folding`: each stage's product times the scales of its blocks, added in float32.

    Of 64 rows at a time, so that the registers hold the total and one such product. While one
    warpgroup adds, the tensor cores multiply for the other.
    """

    block: Block
    products: Products

    def total(
        self, tile: Tile, stage: jax.Array, under: Sequence[Callable[[], None]] = ()
    ) -> tuple[jax.Array, jax.Array]:
        """The sum of the tile's scaled products, in this warpgroup's rows; and the next stage."""
        for act in under:
            act()  # Each product is waited for: none hides it.
        shape = ROWS, self.products.config.tile_n
        first_rows = range(0, self.products.rows, ROWS)

        def step(_: jax.Array, carry: Any) -> Any:
            totals, stage = carry
            totals = self._add_stage(totals, first_rows, stage)
            return totals, self.products.ring.next(stage)

        zeros = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
        start = tuple(zeros for _ in first_rows), stage
        with jax.named_scope("multiply"):
            totals, stage = lax.fori_loop(0, self.block.k_tiles(tile), step, start)
        return _joined(totals, 1), stage

    def wait(self, stage: jax.Array) -> None:
        """Returns once all copies into a stage are complete, those of its scales among them."""
        plgpu.barrier_wait(self.products.ring.full.at[stage])

    def _add_stage(
        self, totals: Sequence[jax.Array], first_rows: range, stage: jax.Array
    ) -> tuple[jax.Array, ...]:
        """The totals with the products of a stage, which is released."""
        ring, width = self.products.ring, self.products.config.tile_n
        scales = ring.scales
        if not isinstance(scales, RingScales):
            raise ValueError("the ring has no scales, and the product's are of blocks.")
        self.wait(stage)
        of_columns = scales.rhs[stage, 0]
        sums = []
        for row, total in zip(first_rows, totals, strict=True):
            of_rows = _of_rows(scales.lhs.at[stage], self.products.first_row + row)

            def multiply(acc: Ref, row: int = row) -> jax.Array:
                self.products.multiply(acc, stage, row, ROWS)
                return acc[...]  # Reading it waits for the product.

            acc = plgpu.WGMMAAccumulatorRef((ROWS, width), jnp.float32)
            product = pl.run_scoped(multiply, acc)
            if row == first_rows[-1]:
                ring.release(stage)  # All of it has been read.
            sums.append(total + product * _over_columns(of_rows * of_columns, width))
        return tuple(sums)

    def bring(self, tile: Tile) -> None:
        """Nothing is needed of the storing warp."""


def _of_rows(scales: Ref, first: jax.Array) -> jax.Array:
    """The scales of `ROWS` rows, as the threads hold these."""
    return plgpu.load(
        scales.at[pl.ds(first, ROWS)], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False
    )


def _over_columns(scales: jax.Array, columns: int) -> jax.Array:
    return lax.broadcast_in_dim(scales, (ROWS, columns), (0,))


def _joined(pieces: Sequence[jax.Array], in_a_row: int) -> jax.Array:
    """Pieces, row by row, put together."""
    rows = [pieces[i : i + in_a_row] for i in range(0, len(pieces), in_a_row)]
    if in_a_row > 1:
        rows = [[jnp.concatenate(row, axis=1)] for row in rows]
    joined = [row for (row,) in rows]
    return jnp.concatenate(joined) if len(joined) > 1 else joined[0]


def scratch(config: TileConfig, product: Product) -> dict[str, Any]:
    """The memory and the barriers of `TileScales`, by name, for `kernel.launch`.

    Of a pair of products the scales of each one's columns are a copy of their own.
    """
    is_pair = product.beside is not None and product.beside.gated
    return dict(
        row_scales_smem=plgpu.SMEM((config.rows,), jnp.float32),
        column_scales_smem=plgpu.SMEM((config.tile_n,), jnp.float32),
        scales_full=plgpu.Barrier(num_arrivals=3 if is_pair else 2),
        scales_empty=plgpu.Barrier(num_arrivals=config.warpgroups),
    )
