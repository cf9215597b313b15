"""The ring of stages in shared memory that tiles of lhs and rhs are loaded into.

| barrier | arrives | waits | proves |
|---|---|---|---|
| `full[stage]` | all copies into it | multiplying warps | it holds tiles, and their scales |
| `empty[stage]` | multiplying warps | loading warp | it may be overwritten |

Of a tile that two blocks make together each has half of the rows of lhs. On Blackwell it has half
of the columns of rhs, and `full` is the first block's (`stages.Halves`). On Hopper it has all of
them, which the blocks load for each other: `empty` then waits for the warps of both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed.schedule import Int
from stretto.kernels.engine.pairs import copies_of_pair
from stretto.kernels.engine.parts import SCALE_COPIES, Product, Ref, Scales, Tile
from stretto.kernels.engine.shared_memory import (
    ALIGNED_SCALES,
    row_elements,
    swizzled,
    with_edges,
)
from stretto.kernels.engine.stages import Arriving, Halves, OwnRows, Shared
from stretto.kernels.engine.tiles import TileShape


class StageScales(Protocol):
    """Scales that come with each stage."""

    def load(self, scales: Scales, tile: Tile, k: Int, stage: jax.Array, /) -> None:
        """Called in the loading warp: starts the copies of a stage's scales."""
        ...


class RingScales(NamedTuple):
    """The scales of a stage's blocks: `lhs` `[stages, rows]`, `rhs` in `SCALE_COPIES` copies.

    `full[stage]` says that they are there, and `empty[stage]` that they may be overwritten: None
    where whoever releases the stage has read them.
    """

    lhs: Ref
    rhs: Ref
    full: Ref
    empty: Ref = None

    def load(self, scales: Scales, tile: Tile, k: Int, stage: jax.Array) -> None:
        """Called in the loading warp: starts the copies of a stage's scales."""
        if self.empty is not None:
            # Whoever scales has read what lay here.
            plgpu.barrier_wait(self.empty.at[stage])
        # Each copy, once complete, publishes its scales.
        full = self.full.at[stage]
        scales.lhs(tile, k, self.lhs.at[stage], full)
        scales.rhs(tile, k, self.rhs.at[stage, pl.ds(0, SCALE_COPIES)], full)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ring:
    """The stages: `lhs` `[stages, tile_m, tile_k]` or transposed, `rhs` likewise, and barriers.

    An operand with edges is loaded through another view of the same memory, `loaded_lhs` and
    `loaded_rhs`. Of rhs both are columns of tiles, `[stages, tile_n / 64, tile_k, 64]`, unless it
    is transposed or has one column (`with_edges`).
    And the scales of blocks (`scales`), where the product has such.
    `halved` are the axes of the tiles of lhs and of rhs of which a block has half; and with
    `shares_rhs` a block has half of lhs alone, along `halved[0]`.
    """

    lhs: Ref
    rhs: Ref
    loaded_lhs: Ref
    loaded_rhs: Ref
    full: Ref
    empty: Ref
    scales: StageScales | None = None
    halved: tuple[int, int] | None = None
    shares_rhs: bool = False

    @classmethod
    def of(
        cls,
        product: Product,
        refs: Mapping[str, Ref],
        scales: StageScales | None = None,
        halved: tuple[int, int] | None = None,
        shares_rhs: bool = False,
    ) -> Ring:
        """The ring of the refs that `scratch` asked for."""
        lhs, rhs = refs["lhs_smem"], refs["rhs_smem"]
        lhs, loaded_lhs = lhs if product.lhs_edges else (lhs, lhs)
        rhs, loaded_rhs = rhs if product.rhs_edges else (rhs, rhs)
        return cls(
            lhs=lhs,
            rhs=rhs,
            loaded_lhs=loaded_lhs,
            loaded_rhs=loaded_rhs,
            full=refs["full"],
            empty=refs["empty"],
            scales=scales,
            halved=halved,
            shares_rhs=shares_rhs,
        )

    @property
    def num_stages(self) -> int:
        """How many there are."""
        return self.lhs.shape[0]

    def arrivals(self, stage: jax.Array) -> tuple[Arriving, Arriving]:
        """Where the copies of lhs and of rhs into the stage arrive, for `stages.fill`."""
        full = self.full.at[stage]
        if self.halved is None:
            return full, full
        lhs, rhs = self.halved
        if self.shares_rhs:
            return OwnRows(full, lhs), Shared(full)
        return Halves(full, lhs), Halves(full, rhs)

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

    def close(self) -> None:
        """Called in the loading warp after its last tile.

        A block ends only when the other one of its pair has filled its stages and has released its
        own: neither reaches into the memory of a block that is gone.
        """
        if self.shares_rhs:
            for stage in range(self.num_stages):
                plgpu.barrier_wait(self.empty.at[stage])


def scratch(
    shape: TileShape,
    num_stages: int,
    product: Product,
    empty: Any,
    *,
    copies: int = 2,
    shares_rhs: bool = False,
) -> dict[str, Any]:
    """The ring's memory and barriers, by name, for `kernel.launch`.

    Args:
      shape: of the tiles.
      num_stages: how many there are.
      product: the types of the operands, and their layouts.
      empty: the barriers of that name, one for each stage.
      copies: that arrive at `full`: one of each tile, and those of scales that come with them. What
        else a tile of rhs takes is added to them (`copies_of_rhs`).
      shares_rhs: each block of a pair has all columns of rhs.
    """
    # Blackwell's blocks load the scales of all rows of their pair.
    rows = shape.tile_m // (shape.blocks if shares_rhs else 1)
    lhs_tile = shape.tile_m // shape.blocks, shape.tile_k
    rhs_tile = shape.tile_k, shape.tile_n // (1 if shares_rhs else shape.blocks)
    if product.lhs_transposed:
        lhs_tile = lhs_tile[::-1]
    if product.rhs_transposed:
        rhs_tile = rhs_tile[::-1]
    lhs, rhs = (num_stages, *lhs_tile), (num_stages, *rhs_tile)
    scales = {}
    if product.scales == "block":
        scales = dict(
            lhs_scales_smem=plgpu.SMEM((num_stages, rows), jnp.float32),
            rhs_scales_smem=plgpu.SMEM((num_stages, ALIGNED_SCALES), jnp.float32),
        )
    return dict(
        lhs_smem=_memory(lhs, product.lhs, edges=product.lhs_edges),
        rhs_smem=_memory(rhs, product.rhs, edges=product.rhs_edges),
        **scales,
        full=plgpu.Barrier(
            num_arrivals=copies - 1 + copies_of_rhs(shape, product), num_barriers=num_stages
        ),
        empty=empty,
    )


def copies_of_rhs(shape: TileShape, product: Product) -> int:
    """The copies that a tile of rhs, or of a pair of them, is loaded by."""
    row = row_elements(product.rhs)
    if product.rhs_edges and not product.rhs_transposed and shape.tile_n != row:
        return shape.tile_n // row
    if product.beside is not None and product.beside.gated:
        return copies_of_pair(shape, product.rhs_transposed)
    return 1


def _memory(shape: tuple[int, ...], dtype: jax.typing.DTypeLike, *, edges: bool) -> Any:
    """Stages, and where the array has edges a second view of them to load through."""
    if edges:
        return with_edges(shape, dtype)
    return plgpu.SMEM(shape, dtype, transforms=swizzled(dtype))
