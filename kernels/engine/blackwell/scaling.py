"""Products of operands in 8 bits, times their scales in float32 (`parts.Scales`), on Blackwell.

| granularity | where the scales are applied | a product takes an accumulator for |
|---|---|---|
| "row" | to the total of a tile, as it is drained | a tile |
| "block" | to the product of each tile along the contraction, 128 wide, as that is drained | a stage |

With "block" the draining warpgroup adds the scaled products up in its registers, in float32.

| barrier | arrives | waits | count | proves |
|---|---|---|---|---|
| `scales_full[slot]` | both copies | draining warpgroup | 2 | the slot holds scales |
| `scales_empty[slot]` | draining warpgroup | loading warp | 1 | they have been read |

A slot belongs to an accumulator with "row", and to a stage of the ring with "block". Both blocks of a
pair load the scales of all of the tile's rows and columns, and read those of their own rows.
"""  # noqa: E501

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed.schedule import Int
from stretto.kernels.engine.blackwell.accumulators import Accumulators
from stretto.kernels.engine.blackwell.pieces import Pieces
from stretto.kernels.engine.blackwell.tile_config import ACCUMULATORS, LANES, TileConfig
from stretto.kernels.engine.block import Block
from stretto.kernels.engine.parts import Product, Ref, Scales, Tile
from stretto.kernels.engine.ring import Ring, RingScales

COLUMNS_AT_ONCE = 32  # of a product, in registers beside the totals
ROWS = plgpu.Layout.TCGEN05.reduce(1)
COLUMNS = plgpu.Layout.TCGEN05.reduce(0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TileScales:
    """Scales of tiles: `rows` `[2, tile_m]`, `columns` `[2, tile_n]`, and their barriers."""

    rows: Ref
    columns: Ref
    full: Ref
    empty: Ref

    def free_slots(self) -> None:
        """Called in the draining warpgroup, once: all slots are free at the start."""
        for slot in range(ACCUMULATORS):
            plgpu.barrier_arrive(self.empty.at[slot])

    def load(self, slot: Int, scales: Scales, tile: Tile) -> None:
        """Called in the loading warp, after a tile's stages."""
        # The draining warpgroup has read the scales of the tile that had the slot.
        plgpu.barrier_wait(self.empty.at[slot])
        # Each copy, once complete, publishes its scales to the draining warpgroup.
        scales.lhs(tile, jnp.int32(0), self.rows.at[slot], self.full.at[slot])
        scales.rhs(tile, jnp.int32(0), self.columns.at[slot], self.full.at[slot])

    def wait(self, slot: Int) -> None:
        """Called in the draining warpgroup: returns once the scales are there."""
        plgpu.barrier_wait(self.full.at[slot])

    def release(self, slot: Int) -> None:
        """Publishes to the loading warp that the draining warpgroup has read the scales."""
        plgpu.commit_smem()  # Before the copy engine writes the next ones.
        plgpu.barrier_arrive(self.empty.at[slot])


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaledByTile:
    """`draining.Totals`: the sum of products, times a scale for each row and each column."""

    block: Block
    accumulators: Accumulators
    pieces: Pieces
    scales: TileScales

    def begin(self) -> None:
        """Frees the accumulators and the slots."""
        self.accumulators.free()
        self.scales.free_slots()

    def of_tile(self, i: Int, tile: Tile, carry: None) -> tuple[Iterator[jax.Array], None]:
        """The scaled pieces of the block's `i`-th tile."""
        return self._pieces(i, tile), carry

    def start(self) -> None:
        """Nothing is remembered from tile to tile."""

    def _pieces(self, i: Int, tile: Tile) -> Iterator[jax.Array]:
        slot, pieces = self.accumulators.of(i), self.pieces
        plain = self.accumulators.pieces(self.block.k_tiles(tile), slot, pieces.places)
        # Both copies of the tile's scales are complete.
        self.scales.wait(slot)
        rows = _load(self.scales.rows.at[slot, pl.ds(pieces.row, LANES)], ROWS)
        for column, piece in zip(pieces.places, plain, strict=True):
            columns = _load(self.scales.columns.at[slot, pl.ds(column, pieces.columns)], COLUMNS)
            if column == pieces.places[-1]:
                self.scales.release(slot)
            yield piece * _over(rows, piece, 0) * _over(columns, piece, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaledByStage:
    """`draining.Totals`: each stage's product times the scales of its blocks, added in float32."""

    block: Block
    accumulators: Accumulators
    pieces: Pieces
    ring: Ring
    scales: RingScales

    def begin(self) -> None:
        """Frees the accumulators and the slots."""
        self.accumulators.free()
        for stage in range(self.ring.num_stages):
            plgpu.barrier_arrive(self.scales.empty.at[stage])

    def start(self) -> tuple[jax.Array, jax.Array]:
        """Of the next product: its stage, and its accumulator."""
        return jnp.int32(0), jnp.int32(0)

    def of_tile(self, i: Int, tile: Tile, carry: Any) -> tuple[Iterator[jax.Array], Any]:
        """The pieces of a tile's total, and the next product's stage and accumulator."""
        del i
        shape = LANES, COLUMNS_AT_ONCE
        zeros = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.TCGEN05)
        start = tuple(zeros for _ in self._places), *carry

        def step(_: jax.Array, state: Any) -> Any:
            totals, stage, half = state
            totals = self._add_product(totals, stage, half)
            return totals, self.ring.next(stage), self.accumulators.next(half)

        with jax.named_scope("scale"):
            totals, *carry = lax.fori_loop(0, self.block.k_tiles(tile), step, start)
        return self._joined(totals), tuple(carry)

    @property
    def _places(self) -> range:
        """The first columns of what is added at once."""
        return range(0, self.pieces.config.tile_n, COLUMNS_AT_ONCE)

    def _joined(self, totals: Sequence[jax.Array]) -> Iterator[jax.Array]:
        """Totals, put together to pieces."""
        in_a_row = self.pieces.columns // COLUMNS_AT_ONCE
        for row in itertools.batched(totals, in_a_row):
            yield jnp.concatenate(row, axis=1) if in_a_row > 1 else row[0]

    def _add_product(
        self, totals: Sequence[jax.Array], stage: jax.Array, half: jax.Array
    ) -> tuple[jax.Array, ...]:
        """The totals with the product that an accumulator holds, which is released."""
        self.wait(stage)
        of_rows = _load(self.scales.lhs.at[stage, pl.ds(self.pieces.row, LANES)], ROWS)
        scales = of_rows * self.scales.rhs[stage, 0]
        self.release(stage)
        # The tensor cores have made the product.
        plgpu.barrier_wait(self.accumulators.made.at[half])
        products = self.accumulators.take(half, self._places)
        return tuple(
            total + product * _over(scales, product, 0)
            for total, product in zip(totals, products, strict=True)
        )

    def wait(self, stage: jax.Array) -> None:
        """Returns once the scales of a stage's blocks are there."""
        plgpu.barrier_wait(self.scales.full.at[stage])

    def release(self, stage: jax.Array) -> None:
        """Publishes to the loading warp that the scales of a stage's blocks have been read."""
        plgpu.commit_smem()  # Before the copy engine writes the next ones.
        plgpu.barrier_arrive(self.scales.empty.at[stage])


def _load(scales: Ref, layout: Any) -> jax.Array:
    """Scales, as the threads hold their rows or columns."""
    return plgpu.load(scales, layout=layout, optimized=False)


def _over(scales: jax.Array, piece: jax.Array, axis: int) -> jax.Array:
    """A scale for each element of a piece, from those along one of its axes."""
    return lax.broadcast_in_dim(scales, piece.shape, (axis,))


def tile_scales(scratch: Mapping[str, Ref]) -> TileScales:
    """Those whose memory and barriers `scratch` has made."""
    return TileScales(
        rows=scratch["row_scales_smem"],
        columns=scratch["column_scales_smem"],
        full=scratch["scales_full"],
        empty=scratch["scales_empty"],
    )


def ring_scales(scratch: Mapping[str, Ref]) -> RingScales:
    """The same of blocks."""
    return RingScales(
        scratch["lhs_scales_smem"],
        scratch["rhs_scales_smem"],
        scratch["scales_full"],
        scratch["scales_empty"],
    )


def scratch(config: TileConfig, product: Product) -> dict[str, Any]:
    """Memory and barriers beside those of the ring, by name, for `kernel.launch`."""
    if product.scales not in ("row", "block"):
        return {}
    slots, memory = config.num_stages, {}
    if product.scales == "row":
        slots = ACCUMULATORS
        memory = dict(
            row_scales_smem=plgpu.SMEM((slots, config.tile_m), jnp.float32),
            column_scales_smem=plgpu.SMEM((slots, config.tile_n), jnp.float32),
        )
    return dict(
        **memory,
        scales_full=plgpu.Barrier(num_arrivals=2, num_barriers=slots),
        scales_empty=plgpu.Barrier(num_barriers=slots),
    )
