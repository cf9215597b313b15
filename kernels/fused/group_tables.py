"""The tables of tiles of a product of groups, which XLA computes from the groups' sizes."""

from __future__ import annotations

import jax
import jax.numpy as jnp

ALIGNED = 8
"""Rows that the first row of a swizzled tile must be a multiple of."""


def cut_off(sizes: jax.Array, m: int) -> jax.Array:
    """Sizes of groups of `m` rows, int32 `[g]`: negative ones as 0, larger ones than m as m.

    So no sum of them overflows, and numbers that int32 cannot hold keep their meaning.
    """
    kind = jnp.iinfo(sizes.dtype)
    if kind.max > jnp.iinfo(jnp.int32).max:  # m may not fit into narrower types.
        sizes = jnp.minimum(sizes, m)
    sizes = jnp.maximum(sizes, 0) if kind.min < 0 else sizes
    return jnp.minimum(sizes.astype(jnp.int32), m)


def bounds(sizes: jax.Array, m: int) -> tuple[jax.Array, jax.Array]:
    """First row of each group and the row after its last one, int32 `[g]`, within the `m` rows."""
    sizes = cut_off(sizes, m)
    before = sum_before(sizes)
    return jnp.minimum(before, m), jnp.minimum(before + sizes, m)


def sum_before(x: jax.Array) -> jax.Array:
    """The sum of those before each of `x`, int32 `[g]`.

    XLA compiles it to one reduction, and `jnp.cumsum` to several kernels, each of which takes
    longer to launch than to run at these sizes.
    """
    number = jnp.arange(len(x))
    return jnp.sum(jnp.where(number < number[:, None], x, 0), axis=1, dtype=jnp.int32)


def row_tiles(
    sizes: jax.Array, m: int, tile_m: int, most: int, *, of_groups: bool = False
) -> jax.Array:
    """The tiles along the rows, int32 `[most + 1, 4]`; their number is first in the last row.

    Of each the group, the first row as a multiple of `ALIGNED`, and the first and the last row
    within the tile that are the group's; the latter exclusive. The rows that belong to no group are
    a group of their own, numbered after the others; with `of_groups` its tiles are not counted.
    """
    starts, ends = bounds(sizes, m)
    starts = jnp.concatenate([starts, ends[-1:]])
    ends = jnp.concatenate([ends, jnp.full(1, m, jnp.int32)])
    aligned = starts // ALIGNED * ALIGNED
    tiles = jnp.where(ends > starts, (ends - aligned + (tile_m - 1)) // tile_m, 0)
    before = sum_before(tiles)
    after = before + tiles
    number = jnp.arange(most + 1, dtype=jnp.int32)
    # The number of groups that end before a tile is its group: a sum, as a search would loop.
    group = jnp.sum(after <= number[:, None], axis=1, dtype=jnp.int32)
    group = jnp.minimum(group, len(tiles) - 1)
    first = aligned[group] + (number - before[group]) * tile_m
    own = (jnp.clip(x[group] - first, 0, tile_m) for x in (starts, ends))
    count = before[-1] if of_groups else after[-1]
    group = jnp.where(number < most, group, count)
    return jnp.stack([group, first // ALIGNED, *own], axis=1).astype(jnp.int32)


def rows_of_tiles(sizes: jax.Array, m: int, tile_m: int, most: int) -> jax.Array:
    """The row in each row of each tile of `row_tiles`, int32 `[most * tile_m]`; maybe beyond m."""
    first = row_tiles(sizes, m, tile_m, most)[:-1, 1:2] * ALIGNED
    return (first + jnp.arange(tile_m, dtype=jnp.int32)).reshape(-1)


def k_tiles_of(sizes: jax.Array, m: int, tile_k: int) -> tuple[jax.Array, jax.Array]:
    """The tiles along the contraction, int32 `[g, 3]`, and rows to be copied, `[g, 2 * tile_k]`.

    Of each group the first row of its whole tiles as a multiple of `ALIGNED`, the number of these,
    and the number of tiles that its other rows fill: fewer than `ALIGNED` before them and fewer
    than `tile_k` after them. A missing row to be copied has an index beyond every array.
    """
    starts, ends = bounds(sizes, m)
    first = jnp.minimum((starts + ALIGNED - 1) // ALIGNED * ALIGNED, ends)
    whole = (ends - first) // tile_k
    before = first - starts
    loose = ends - starts - whole * tile_k
    number = jnp.arange(2 * tile_k, dtype=jnp.int32)
    after = (first + whole * tile_k - before)[:, None] + number
    rows = jnp.where(number < before[:, None], starts[:, None] + number, after)
    rows = jnp.where(number < loose[:, None], rows, jnp.iinfo(jnp.int32).max)
    copied = (loose + (tile_k - 1)) // tile_k
    return jnp.stack([first // ALIGNED, whole, copied], axis=1).astype(jnp.int32), rows
