"""`lhs^T @ rhs` of each group's rows: the derivative of `grouped_matmul` by its matrices.

The contraction of a tile runs over the rows of its group: whole tiles of rows in place, and the
rows before and after these from a copy that is padded with zeros (`group_tables.k_tiles_of`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed.schedule import Int
from stretto.kernels.engine import padding, stages
from stretto.kernels.engine.architectures import TileConfig, mainloop_of
from stretto.kernels.engine.fuse import Refs, fuse
from stretto.kernels.engine.orders import GroupsOrder, ShardOrder
from stretto.kernels.engine.parts import Parts, Product, Ref, Sink, Stream, Tile
from stretto.kernels.engine.tiles import piece_window
from stretto.kernels.fused.group_tables import ALIGNED, k_tiles_of


def contracted(
    lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, *, tiles: TileConfig, interpret: Any
) -> jax.Array:
    """`lhs^T @ rhs` of each group's rows, `[m, k]`, `[m, n]` and `[g]` sizes -> `[g, k, n]`.

    In lhs's type; zero for a group without rows.
    """
    groups = sizes.shape[0]
    (m, k), n = lhs.shape, rhs.shape[1]
    lhs, rhs = (padding.pad_to_tiles(x, padding.ROWS) for x in (lhs, rhs))
    table, loose = k_tiles_of(sizes, m, tiles.tile_k)
    order = ShardOrder(lhs.shape[1], rhs.shape[1], tiles, steps=groups)

    def stream(whole: Ref, copied: Ref, columns: Callable[[Tile], pl.Slice]) -> Stream:
        """An operand's rows, `tile_k` at a time: whole tiles in place, then the copied rows."""

        def load(tile: Tile, k: Int, stage: Ref, barrier: Ref) -> None:
            first_row, where_they_lie = tile.facts[:2]

            @pl.when(k < where_they_lie)
            def _():
                first = first_row * ALIGNED + k * tiles.tile_k
                window = whole.at[pl.ds(first, tiles.tile_k), columns(tile)]
                stages.fill(window, stage, barrier)

            @pl.when(k >= where_they_lie)
            def _():
                first = (k - where_they_lie) * tiles.tile_k
                window = copied.at[tile.step, pl.ds(first, tiles.tile_k), columns(tile)]
                stages.fill(window, stage, barrier)

        return Stream(load=load)

    def parts(refs: Refs) -> Parts:
        def store(tile: Tile, piece: Ref, row: Int, column: Int) -> None:
            rows, columns = piece.shape
            window = piece_window(tiles, tile.m, tile.n, row, rows, column, columns)
            target = refs.out.at[tile.step, *window]
            plgpu.copy_smem_to_gmem(piece, target, commit_group=False)

        return Parts(
            order=GroupsOrder(
                order, lambda group: tuple(refs.table[group, fact] for fact in range(3))
            ),
            ahead=True,
            k_tiles=lambda tile: tile.facts[1] + tile.facts[2],
            lhs=stream(
                refs.lhs,
                refs.lhs_copied,
                lambda tile: pl.ds(tile.m * tiles.tile_m, tiles.tile_m),
            ),
            rhs=stream(
                refs.rhs,
                refs.rhs_copied,
                lambda tile: pl.ds(tile.n * tiles.tile_n, tiles.tile_n),
            ),
            sink=Sink(store=store),
        )

    product = Product(lhs=lhs.dtype, rhs=rhs.dtype, out=lhs.dtype, lhs_transposed=True)
    out = fuse(
        parts,
        name="grouped_contraction",
        team=None,
        mainloop=mainloop_of(tiles, product),
        num_tiles=order.num_tiles,
        operands=dict(
            lhs=lhs,
            rhs=rhs,
            lhs_copied=lhs.at[loose].get(mode="fill", fill_value=0),
            rhs_copied=rhs.at[loose].get(mode="fill", fill_value=0),
            table=table,
        ),
        outs=dict(out=jax.ShapeDtypeStruct((groups, lhs.shape[1], rhs.shape[1]), lhs.dtype)),
        interpret=interpret,
    )["out"]
    return out[:, :k, :n]
