"""Scales of operands in 8 bits, in the form that kernels load them in (`parts.Scales`).

| granularity | lhs | rhs |
|---|---|---|
| "row" | `[1, rows]` | `[1, columns]` |
| "block" | `[k / 128, rows]` | `[columns / 128, k / 128, SCALE_COPIES]`, each `SCALE_COPIES` times |
| "mx" | `[rows / 128, k / 128, 32, 16]` | `[columns / 128, k / 128, 32, 16]` |

The scales of lhs are contiguous for the rows of a tile, and padded with zeros to whole tiles: where
they are fetched, a store of one row is contiguous, and would continue past the edge. XLA makes these
copies; they are small. The scales of columns are only loaded, and past the edge a load finds zeros.
"""  # noqa: E501

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed.kernel import block_in_cluster
from stretto.distributed.schedule import Int, div
from stretto.kernels.engine import stages
from stretto.kernels.engine.parts import SCALE_COPIES, Epilogue, Load, Ref, Scales, Tile
from stretto.kernels.engine.segments import Segments
from stretto.kernels.engine.tiles import TileShape
from stretto.kernels.problem.scales import BLOCK, MX_BLOCK, Granularity, blocks

MX_TILE = 32, 16
"""The arrangement of the scales of 128 rows times 4 blocks of 32."""

EXPONENT_OF_ONE = 127


def of_rows(scale: jax.Array, rows: int) -> jax.Array:
    """`[..., m, k / 128]` or `[..., m, 1]` -> `[..., k / 128 or 1, rows]`, padded with zeros."""
    turned = scale.swapaxes(-1, -2)
    missing = rows - turned.shape[-1]
    return jnp.pad(turned, [(0, 0)] * (turned.ndim - 1) + [(0, missing)]) if missing else turned


def of_columns(
    scale: jax.Array, granularity: Granularity, columns: int, *, transposed: bool
) -> jax.Array:
    """The scales of rhs, `[..., n, k]` in shape if `transposed`, as in the table above.

    `columns` is the number of columns of padded operands.
    """
    scale = scale if transposed else scale.swapaxes(-1, -2)
    if granularity == "row":
        return of_rows(scale, columns)
    return jnp.repeat(scale[..., None], SCALE_COPIES, axis=-1)


def arranged(scale: jax.Array, rows: int) -> jax.Array:
    """Scales of "mx", `[..., m, k / 32]`, as in the table above, padded with ones.

    The arrangement is that of `jax.experimental.mosaic.gpu.tcgen05.async_copy_scales_smem_to_tmem`,
    and of PTX's `tcgen05.mma` with `scale_vec::1X`.
    """
    *lead, m, columns = scale.shape
    across = -(-columns // 4)
    bits = lax.bitcast_convert_type(scale, jnp.uint8)
    widths = [*[(0, 0)] * len(lead), (0, rows - m), (0, 4 * across - columns)]
    bits = jnp.pad(bits, widths, constant_values=EXPONENT_OF_ONE)
    tiles = bits.reshape(*lead, rows // 128, 4, 32, across, 4)
    tiles = jnp.moveaxis(tiles, (-2, -3, -4), (-4, -3, -2))
    whole = tiles.reshape(*lead, rows // 128, across, *MX_TILE)
    return lax.bitcast_convert_type(whole, scale.dtype)


def load_arranged_rows(
    view: Callable[[Tile], Ref], shape: TileShape, row: Callable[[Tile], Int] = lambda tile: tile.m
) -> Load:
    """Loads the scales of "mx" of a tile's rows, as `load_rows` does others."""
    count = shape.tile_m // BLOCK

    def load(tile: Tile, k: Int, stage: Ref, barrier: Ref) -> None:
        window = pl.ds(row(tile) * count, count), pl.ds(k, 1)
        stages.fill(view(tile).at[window], stage, barrier)

    return load


def load_arranged_columns(
    refs: Sequence[Ref],
    segments: Segments,
    shape: TileShape,
    leading: Callable[[Tile], tuple[Int, ...]],
) -> Load:
    """The same of a tile's columns, as `load_columns` does others."""
    count = shape.tile_n // BLOCK

    def load(tile: Tile, k: Int, stage: Ref, barrier: Ref) -> None:
        def load_from(index: int, number: Int) -> None:
            window = pl.ds(number * count, count), pl.ds(k, 1)
            stages.fill(refs[index].at[*leading(tile), *window], stage, barrier)

        segments.visit(tile.n, load_from)

    return load


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scaling:
    """The scales of a call, in the form that kernels load them in.

    Attributes:
      granularity: of both.
      lhs: `[..., k / 128 or 1, rows]`, rows of whole tiles; of "mx" as in the table above.
      rhs: of each right-hand side, as in the table above.
    """

    granularity: Granularity
    lhs: jax.Array
    rhs: tuple[jax.Array, ...]

    @classmethod
    def of(
        cls,
        granularity: Granularity,
        lhs: jax.Array,
        rhs: Sequence[jax.Array],
        *,
        k: int,
        rows: int,
        columns: Sequence[int],
        shape: TileShape,
        multiple: int = 1,
    ) -> Scaling:
        """The scales of `problem.scales.checked`, of a transposed rhs, for padded operands.

        Args:
          granularity, lhs, rhs: what `checked` returned; leading dimensions of lhs stay.
          k: of the operands.
          rows: of lhs.
          columns: of each right-hand side.
          shape: of the tiles.
          multiple: of which the number of lhs's blocks along k is one, after padding.
        """

        def in_tiles(size: int, tile: int) -> int:
            return -(-size // tile) * tile

        if granularity == "mx":
            sides = zip(rhs, columns, strict=True)
            return cls(
                granularity=granularity,
                lhs=_in_stages(lhs, k, in_tiles(rows, shape.tile_m)),
                rhs=tuple(_in_stages(x, k, in_tiles(n, shape.tile_n)) for x, n in sides),
            )
        along_k = blocks(k) if granularity == "block" else 1

        def with_k(scale: jax.Array, count: int) -> jax.Array:
            missing = count - scale.shape[-1]
            return jnp.pad(scale, [(0, 0)] * (scale.ndim - 1) + [(0, missing)])

        return cls(
            granularity=granularity,
            lhs=of_rows(with_k(lhs, in_tiles(along_k, multiple)), in_tiles(rows, shape.tile_m)),
            rhs=tuple(
                of_columns(with_k(x, along_k), granularity, n, transposed=True)
                for x, n in zip(rhs, columns, strict=True)
            ),
        )

    def operands(self) -> dict[str, Any]:
        """The operands of a kernel, by the names that `parts` reads."""
        return dict(lhs_scales=self.lhs, rhs_scales=list(self.rhs))

    def parts(
        self,
        lhs: Load,
        columns: Sequence[Ref],
        segments: Segments,
        shape: TileShape,
        leading: Callable[[Tile], tuple[Int, ...]] = lambda tile: (),
    ) -> Scales:
        """The loads of the main loop: `lhs`, and the scales of rhs by `load_columns`."""
        if self.granularity == "mx":
            of_rhs = load_arranged_columns(columns, segments, shape, leading)
            return Scales(lhs=lhs, rhs=of_rhs)
        of_rhs = load_columns(columns, segments, shape, self.granularity, leading)
        return Scales(lhs=lhs, rhs=of_rhs)


def _in_stages(scale: jax.Array, k: int, rows: int) -> jax.Array:
    """Scales of "mx", arranged, for a contraction of `k` elements, which may have been padded."""
    missing = blocks(k) * (BLOCK // MX_BLOCK) - scale.shape[-1]
    ones = jnp.ones((*scale.shape[:-1], missing), scale.dtype)
    return arranged(jnp.concatenate([scale, ones], axis=-1) if missing else scale, rows)


def times_factors(factors: Sequence[Ref]) -> Epilogue:
    """Multiplies a total by the scales of two tensors, one number each, which are read once."""
    factor = factors[0][0] * factors[1][0]
    return lambda piece, tile, row, column: piece * factor


def load_rows(
    view: Callable[[Tile], Ref],
    shape: TileShape,
    row: Callable[[Tile], Int] = lambda tile: tile.m,
) -> Load:
    """Loads the scales of a tile's rows, from the first to the last of its `row`, of `view`."""

    def load(tile: Tile, k: Int, stage: Ref, barrier: Ref) -> None:
        window = window_of_rows(row(tile) * shape.tile_m, stage, shape)
        plgpu.copy_gmem_to_smem(view(tile).at[k, window], stage, barrier)

    return load


def window_of_rows(first: Int, stage: Ref, shape: TileShape) -> pl.Slice:
    """The rows of a tile that begins at `first`; where `stage` has room for a block's, these."""
    rows = stage.shape[0]
    if rows < shape.tile_m:
        first += block_in_cluster() * rows
    return pl.ds(first, rows)


def load_columns(
    refs: Sequence[Ref],
    segments: Segments,
    shape: TileShape,
    granularity: Granularity,
    leading: Callable[[Tile], tuple[Int, ...]] = lambda tile: (),
) -> Load:
    """Loads the scales of a tile's columns, of right-hand sides side by side in `segments`.

    `leading` are the indices of a tile's matrix in a ref of more dimensions.
    """

    def load(tile: Tile, k: Int, stage: Ref, barrier: Ref) -> None:
        def load_from(index: int, n: Int) -> None:
            if granularity == "row":
                window = (0, pl.ds(n * shape.tile_n, shape.tile_n))
            else:
                window = (div(n * shape.tile_n, BLOCK), k)
            plgpu.copy_gmem_to_smem(refs[index].at[*leading(tile), *window], stage, barrier)

        segments.visit(tile.n, load_from)

    return load
