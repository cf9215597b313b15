"""`grouped_matmul` of operands in 8 bits: the scales of rows in groups, and of their matrices.

A row's scales are loaded with its tile, those of a matrix at the tile's group. Rows that belong to no
group share a tile with others: their scales are zeros, and so are those of the group that they form.
"""  # noqa: E501

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from stretto.kernels.engine import padding
from stretto.kernels.engine.architectures import TileConfig
from stretto.kernels.engine.scales import Scaling
from stretto.kernels.fused import obstacles
from stretto.kernels.fused.group_tables import bounds, rows_of_tiles
from stretto.kernels.fused.grouped_matmul import KERNEL, GroupedRows, grouped
from stretto.kernels.operation import Call
from stretto.kernels.problem.scales import Granularity


def scaled(operands: Any, call: Call) -> jax.Array:
    """`run` in 8 bits, rhs transposed: of (lhs, rhs, sizes, lhs's scales, rhs's scales).

    The scales are as `problem.scales.checked` returns them. Rows that belong to no group get the
    scales of one more group, zeros, so their results are zero whatever they contain; of "mx" they
    have no products.
    """
    lhs, rhs, sizes, lhs_scale, rhs_scale = operands
    m, n = lhs.shape[0], rhs.shape[1]
    padded = padding.pad_to_tiles(lhs, padding.ROWS)
    sides = padding.pad_to_tiles(rhs, padding.COLUMNS)
    tiles = call.config.tiles
    if call.options.scales == "mx":
        most = GroupedRows.of(padded.shape[0], sides, tiles, True).most
        rows = rows_of_tiles(sizes, padded.shape[0], tiles.tile_m, most)
        scaling = Scaling.of(
            "mx",
            lhs_scale[jnp.minimum(rows, m - 1)],
            [rhs_scale],
            k=padded.shape[1],
            rows=len(rows),
            columns=[sides.shape[1]],
            shape=tiles,
        )
    else:
        granularity = call.options.scales
        scaling = scaling_of_groups(
            granularity, padded, [sides], sizes, lhs_scale, [rhs_scale], tiles
        )
    out = grouped(
        padded,
        sides,
        sizes,
        out_dtype=call.options.out_dtype,
        tiles=tiles,
        rhs_transposed=True,
        scaling=scaling,
        zeros=call.options.zeros,
        interpret=call.interpret,
    )
    return out[:m, :n]


def scaling_of_groups(
    granularity: Granularity,
    lhs: jax.Array,
    rhs: Sequence[jax.Array],
    sizes: jax.Array,
    lhs_scale: jax.Array,
    rhs_scale: Sequence[jax.Array],
    tiles: TileConfig,
) -> Scaling:
    """The scales of padded rows `[m, k]` and of transposed matrices `[g, n, k]`, in float32.

    Rows of no group are multiplied by zero, and so are the columns of the group that they form.
    """
    in_a_group = jnp.arange(len(lhs_scale)) < bounds(sizes, len(lhs_scale))[1][-1]
    return Scaling.of(
        granularity,
        jnp.where(in_a_group[:, None], lhs_scale, 0),
        [jnp.concatenate([x, jnp.zeros_like(x[:1])]) for x in rhs_scale],
        k=lhs.shape[1],
        rows=lhs.shape[0] + tiles.tile_m,  # The last tile may begin at any eighth row.
        columns=[x.shape[1] for x in rhs],
        shape=tiles,
    )


SCALED = dataclasses.replace(KERNEL, run=scaled, obstacle=obstacles.scaled, untried=True)
"""Of operands in 8 bits with scales."""
