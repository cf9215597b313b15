"""Scales of operands in 8 bits, in the form that kernels load them in (`parts.Scales`).

| granularity | lhs | rhs |
|---|---|---|
| "row" | `[1, rows]` | `[1, columns]` |
| "block" | `[k / 128, rows]` | `[columns / 128, k / 128, SCALE_COPIES]`, each so many times |
| "mx" | `[rows / 128, k / 128, 32, 16]` | `[columns / 128, k / 128, 32, 16]` |

Those of lhs lie side by side for the rows of a tile, and are filled up with zeros to whole tiles: a
copy of one row is contiguous, and would not be cut off at the edge. XLA makes them so; they are small.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed.schedule import Int, div
from stretto.kernels.engine import stages
from stretto.kernels.engine.parts import SCALE_COPIES, Load, Ref, Tile
from stretto.kernels.engine.segments import Segments
from stretto.kernels.engine.tiles import TileShape
from stretto.kernels.problem.scales import BLOCK, Granularity

MX_TILE = 32, 16
"""Of 128 rows times 4 blocks of 32, the arrangement of their scales."""

EXPONENT_OF_ONE = 127


def of_rows(scale: jax.Array, rows: int) -> jax.Array:
    """`[..., m, k / 128]` or `[..., m, 1]` -> `[..., k / 128 or 1, rows]`, filled up with zeros."""
    turned = scale.swapaxes(-1, -2)
    missing = rows - turned.shape[-1]
    return jnp.pad(turned, [(0, 0)] * (turned.ndim - 1) + [(0, missing)]) if missing else turned


def of_columns(
    scale: jax.Array, granularity: Granularity, columns: int, *, transposed: bool
) -> jax.Array:
    """The scales of rhs, `[..., n, k]` in shape if `transposed`, as in the table above.

    `columns` are so many that they fill tiles.
    """
    scale = scale if transposed else scale.swapaxes(-1, -2)
    if granularity == "row":
        return of_rows(scale, columns)
    return jnp.repeat(scale[..., None], SCALE_COPIES, axis=-1)


def arranged(scale: jax.Array, rows: int) -> jax.Array:
    """Scales of "mx", `[m, k / 32]`, as in the table above, filled up with ones.

    The arrangement is that of `jax.experimental.mosaic.gpu.tcgen05.async_copy_scales_smem_to_tmem`,
    and of PTX's `tcgen05.mma` with `scale_vec::1X`.
    """
    missing, across = rows - scale.shape[0], scale.shape[1] // 4
    bits = lax.bitcast_convert_type(scale, jnp.uint8)
    bits = jnp.pad(bits, ((0, missing), (0, 0)), constant_values=EXPONENT_OF_ONE)
    tiles = bits.reshape(rows // 128, 4, 32, across, 4).transpose(0, 3, 2, 1, 4)
    return lax.bitcast_convert_type(tiles.reshape(rows // 128, across, *MX_TILE), scale.dtype)


def load_arranged(
    refs: Sequence[Ref], segments: Segments, which: Callable[[Tile], Int], size: int
) -> Load:
    """Loads the scales of "mx" of a tile's rows or columns, `size` of them.

    `which` is the row or the column of tiles, of operands side by side in `segments`.
    """
    count = size // 128

    def load(tile: Tile, k: Int, stage: Ref, barrier: Ref) -> None:
        def load_from(index: int, number: Int) -> None:
            window = pl.ds(number * count, count), pl.ds(k, 1)
            stages.fill(refs[index].at[window], stage, barrier)

        segments.visit(which(tile), load_from)

    return load


def load_rows(view: Callable[[Tile], Ref], shape: TileShape) -> Load:
    """Loads the scales of a tile's rows, from the first to the last of `tile.m`, of `view`."""

    def load(tile: Tile, k: Int, stage: Ref, barrier: Ref) -> None:
        window = pl.ds(tile.m * shape.tile_m, shape.tile_m)
        plgpu.copy_gmem_to_smem(view(tile).at[k, window], stage, barrier)

    return load


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
