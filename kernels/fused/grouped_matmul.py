"""`out[r] = lhs[r] @ rhs[group of r]`, and the derivative by rhs, on one device.

Rows of lhs are ordered by group, and the sizes of the groups are read at run time. Tables that XLA
computes from the sizes list the tiles (`tables`):

| product | a tile is | its contraction | its edge |
|---|---|---|---|
| `grouped` | rows of one group | k | rows of other groups are not stored (`Sink.rows`) |
| `contracted`, `lhs^T @ rhs` of each group | any of the group's result | the group's rows | rows that fill no tile are copied, and filled up with zeros |

The copy engine takes swizzled tiles from every eighth row on (Mosaic GPU, JAX 0.11.2), so tiles begin
there, and may begin with rows of the group before. There are no semaphores: nothing waits for another
block. Rows that belong to no group are zero: they are a group without a contraction.
"""  # noqa: E501

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed.schedule import Int, ceil_div, where
from stretto.kernels.engine import padding, stages, streams
from stretto.kernels.engine.architectures import (
    TileConfig,
    check_tiles,
    mainloop_of,
    scales_bytes,
    tiles_for,
)
from stretto.kernels.engine.fuse import Refs, fuse
from stretto.kernels.engine.hopper import tile_config
from stretto.kernels.engine.orders import GroupsOrder, RowTilesOrder, ShardOrder
from stretto.kernels.engine.parts import Parts, Product, Ref, Scales, Sink, Stream, Tile
from stretto.kernels.engine.scales import Scaling
from stretto.kernels.engine.segments import Segments
from stretto.kernels.engine.shared_memory import SMEM_BYTES
from stretto.kernels.engine.tiles import piece_window, rhs_window
from stretto.kernels.fused import copied, obstacles
from stretto.kernels.fused.obstacles import obstacle
from stretto.kernels.operation import Call, Kernel
from stretto.kernels.problem.problem import Problem

ALIGNED = 8
"""Rows that the first row of a swizzled tile must be a multiple of."""
MANY_ROWS = 1024
"""Of a group, for tiles of 256 rows: an eighth of them is half a tile."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How the kernel is cut up.

    Attributes:
      tiles: of the matmul.
    """

    tiles: TileConfig = tile_config.LARGE

    def check(self, problem: Problem) -> None:
        """Raises ValueError unless the kernel can be built so for `problem`."""
        check_tiles(self.tiles, problem)
        needed = self.tiles.smem_bytes(problem.types.itemsize) + scales_bytes(self.tiles, problem)
        if needed > SMEM_BYTES:
            raise ValueError(
                f"the kernel needs {needed} bytes of shared memory and a block has"
                f" {SMEM_BYTES}; take fewer stages."
            )

    @staticmethod
    def candidates(problem: Problem | None = None) -> Iterator[Config]:
        """What the tuner tries, the likely ones first."""
        tiles = tiles_for(problem)
        for tile in dict.fromkeys((*tiles.large_ones, tiles.narrow)):
            for raster_width in (16, 4, 8):
                yield Config(tiles=dataclasses.replace(tile, raster_width=raster_width))


def default_config(problem: Problem) -> Config:
    """The configuration for a problem that no table has.

    A group of any number of rows leaves half a tile empty on average.
    """
    tiles, rows = tiles_for(problem), problem.sizes["m"] // problem.sizes["g"]
    return Config(tiles=tiles.large_for(rows) if rows >= MANY_ROWS else tiles.large)


def run(operands: tuple[jax.Array, jax.Array, jax.Array], call: Call) -> jax.Array:
    """`[m, k]`, `[g, k, n]` or `[g, n, k]`, sizes `[g]` -> `[m, n]`, as the public operation."""
    lhs, rhs, sizes = operands
    transposed = call.options.rhs_transposed
    m, n = lhs.shape[0], rhs.shape[1 if transposed else 2]
    out = grouped(
        padding.pad_to_tiles(lhs, padding.ROWS),
        padding.pad_to_tiles(rhs, padding.COLUMNS),
        sizes,
        out_dtype=call.options.out_dtype,
        tiles=call.config.tiles,
        rhs_transposed=transposed,
        interpret=call.interpret,
    )
    return out[:m, :n]


def scaled(operands: Any, call: Call) -> jax.Array:
    """`run` in 8 bits, rhs transposed: of (lhs, rhs, sizes, lhs's scales, rhs's scales).

    The scales are as `problem.scales.checked` returns them. Rows that belong to no group have those
    of one more group, zeros: whatever theirs are, their results are zero.
    """
    lhs, rhs, sizes, lhs_scale, rhs_scale = operands
    m, n = lhs.shape[0], rhs.shape[1]
    padded = padding.pad_to_tiles(lhs, padding.ROWS)
    sides = padding.pad_to_tiles(rhs, padding.COLUMNS)
    tiles = call.config.tiles
    in_a_group = jnp.arange(m) < bounds(sizes, m)[1][-1]
    scaling = Scaling.of(
        call.options.scales,
        jnp.where(in_a_group[:, None], lhs_scale, 0),
        [jnp.concatenate([rhs_scale, jnp.zeros_like(rhs_scale[:1])])],
        k=padded.shape[1],
        rows=padded.shape[0] + tiles.tile_m,  # The last tile may begin at any eighth row.
        columns=[sides.shape[1]],
        shape=tiles,
    )
    out = grouped(
        padded,
        sides,
        sizes,
        out_dtype=call.options.out_dtype,
        tiles=tiles,
        rhs_transposed=True,
        scaling=scaling,
        interpret=call.interpret,
    )
    return out[:m, :n]


def grouped(
    lhs: jax.Array,
    rhs: jax.Array,
    sizes: jax.Array,
    *,
    out_dtype: Any,
    tiles: TileConfig,
    rhs_transposed: bool,
    scaling: Scaling | None = None,
    interpret: Any,
) -> jax.Array:
    """The product on padded operands (`padding`): `[m, k]`, `[g, k, n]` and `[g]` -> `[m, n]`.

    With `scaling`, rhs's of one group more.
    """
    m = lhs.shape[0]
    grouped = GroupedRows.of(m, rhs, tiles, rhs_transposed)

    def parts(refs: Refs) -> Parts:
        found = grouped.parts(refs, streams.of(refs.lhs, grouped.lhs_window))
        if scaling is None:
            return found
        return dataclasses.replace(found, scales=grouped.scales(refs, scaling))

    product = Product(
        lhs=lhs.dtype,
        rhs=rhs.dtype,
        out=out_dtype,
        rhs_transposed=rhs_transposed,
        ragged=True,
        scales=None if scaling is None else scaling.granularity,
    )
    return fuse(
        parts,
        name="grouped_matmul",
        team=None,
        mainloop=mainloop_of(tiles, product),
        num_tiles=grouped.num_tiles,
        operands=dict(
            lhs=lhs,
            rhs=rhs,
            table=row_tiles(sizes, m, tiles.tile_m, grouped.most),
            **({} if scaling is None else scaling.operands()),
        ),
        outs=dict(out=jax.ShapeDtypeStruct((m, grouped.n), out_dtype)),
        interpret=interpret,
    )["out"]


@dataclasses.dataclass(frozen=True)
class GroupedRows:
    """Rows in groups times the matrix of their group, as parts: all but where the rows come from.

    The kernel's refs have `table` (`row_tiles`), `rhs` and `out`.

    Attributes:
      most: row tiles that there are at most.
      k, n: of a group's matrix, padded.
      groups: their number.
      tiles: of the matmul.
      rhs_transposed: how rhs is given.
    """

    most: int
    k: int
    n: int
    groups: int
    tiles: TileConfig
    rhs_transposed: bool

    @classmethod
    def of(cls, m: int, rhs: jax.Array, tiles: TileConfig, rhs_transposed: bool) -> GroupedRows:
        """Of `m` rows and a padded rhs, `[g, k, n]` or transposed."""
        groups, k, n = rhs.shape[0], *(rhs.shape[:0:-1] if rhs_transposed else rhs.shape[1:])
        return cls(ceil_div(m, tiles.tile_m) + groups + 1, k, n, groups, tiles, rhs_transposed)

    @property
    def num_tiles(self) -> int:
        """Tiles that there are at most."""
        return self.most * ceil_div(self.n, self.tiles.tile_n)

    def lhs_window(self, tile: Tile, k: Int) -> tuple:
        """Where the rows of a tile lie in `[m, k]`."""
        tiles = self.tiles
        return pl.ds(_first_row(tile), tiles.tile_m), pl.ds(k * tiles.tile_k, tiles.tile_k)

    def parts(self, refs: Refs, lhs: Stream) -> Parts:
        """The kernel, whose rows are `lhs`."""
        tiles, n = self.tiles, self.n

        def store(tile: Tile, piece: Ref, row: Int, column: Int) -> None:
            rows, columns = piece.shape
            first_column = tile.n * tiles.tile_n + column

            # A copy of one row is contiguous, and is not cut off at the edge of the columns.
            @pl.when(first_column < n)
            def _():
                window = pl.ds(_first_row(tile) + row, rows), pl.ds(first_column, columns)
                plgpu.copy_smem_to_gmem(piece, refs.out.at[window], commit_group=False)

        def rhs_of(tile: Tile, k: Int) -> tuple:
            return _group(tile), *rhs_window(tiles, k, tile.n, self.rhs_transposed)

        return Parts(
            order=RowTilesOrder(
                refs.table[self.most, 0],
                self.most,
                ceil_div(n, tiles.tile_n),
                tiles,
                facts=lambda m: tuple(refs.table[m, fact] for fact in range(4)),
            ),
            ahead=True,
            k_tiles=lambda tile: where(
                _group(tile) < self.groups, ceil_div(self.k, tiles.tile_k), 0
            ),
            lhs=lhs,
            rhs=streams.of(refs.rhs, rhs_of),
            sink=Sink(store=store, rows=lambda tile: (tile.facts[2], tile.facts[3])),
        )

    def scales(self, refs: Refs, scaling: Scaling) -> Scales:
        """What loads the scales of the rows and of their group's matrix."""

        def load_rows(tile: Tile, k: Int, stage: Ref, barrier: Ref) -> None:
            window = refs.lhs_scales.at[k, pl.ds(_first_row(tile), self.tiles.tile_m)]
            plgpu.copy_gmem_to_smem(window, stage, barrier)

        columns = Segments.of([self.n], self.tiles.tile_n)
        leading = lambda tile: (_group(tile),)  # noqa: E731
        return scaling.parts(load_rows, refs.rhs_scales, columns, self.tiles, leading)


def _group(tile: Tile) -> Int:
    return tile.facts[0]


def _first_row(tile: Tile) -> Int:
    return tile.facts[1] * ALIGNED


def contracted(
    lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, *, config: Config, interpret: Any
) -> jax.Array:
    """`lhs^T @ rhs` of each group's rows, `[m, k]`, `[m, n]` and `[g]` sizes -> `[g, k, n]`.

    In lhs's type; zero for a group without rows.
    """
    tiles, groups = config.tiles, sizes.shape[0]
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


# --- Tables, made by XLA before the kernel --------------------------------------------------------


def bounds(sizes: jax.Array, m: int) -> tuple[jax.Array, jax.Array]:
    """First row of each group and the row after its last one, int32 `[g]`, within the `m` rows."""
    sizes = jnp.maximum(sizes, 0).astype(jnp.int32)
    before = sum_before(sizes)
    return jnp.minimum(before, m), jnp.minimum(before + sizes, m)


def sum_before(x: jax.Array) -> jax.Array:
    """The sum of those before each of `x`, int32 `[g]`.

    XLA compiles it to one reduction, and `jnp.cumsum` to several kernels, each of which takes
    longer to launch than to run at these sizes.
    """
    number = jnp.arange(len(x))
    return jnp.sum(jnp.where(number < number[:, None], x, 0), axis=1, dtype=jnp.int32)


def row_tiles(sizes: jax.Array, m: int, tile_m: int, most: int) -> jax.Array:
    """The tiles along the rows, int32 `[most + 1, 4]`; their number is first in the last row.

    Of each the group, the first row as a multiple of `ALIGNED`, and the first and the last row
    within the tile that are the group's; the latter exclusive. The rows that belong to no group are
    a group of their own, numbered after the others.
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
    group = jnp.where(number < most, group, after[-1])
    return jnp.stack([group, first // ALIGNED, *own], axis=1).astype(jnp.int32)


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


KERNEL = Kernel(
    Config=Config,
    run=run,
    obstacle=obstacle,
    default=default_config,
    candidates=Config.candidates,
    copies=copied.one_device,
)

SCALED = dataclasses.replace(KERNEL, run=scaled, obstacle=obstacles.scaled, untried=True)
"""Of operands in 8 bits with scales."""
