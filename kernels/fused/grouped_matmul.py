"""`out[r] = lhs[r] @ rhs[group of r]`, and the derivative by rhs, on one device.

Rows of lhs are ordered by group, and the sizes of the groups are read at run time. Tables that XLA
computes from the sizes list the tiles (`group_tables`):

| product | a tile is | its contraction | its edge |
|---|---|---|---|
| `grouped` | rows of one group | k | rows of other groups are not stored (`Sink.rows`) |
| `grouped_contraction`, `lhs^T @ rhs` of each group | any of the group's result | the group's rows | rows that fill no tile are copied, and padded with zeros |

The copy engine loads swizzled tiles from rows that are multiples of 8 (Mosaic GPU, JAX 0.11.2). So
tiles begin at such rows, and may begin with rows of the previous group. There are no semaphores: no
block waits for another. Rows that belong to no group are zero: they form a group without a contraction.
"""  # noqa: E501

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed.schedule import Int, ceil_div, where
from stretto.kernels.engine import padding, streams
from stretto.kernels.engine.architectures import (
    TileConfig,
    check_tiles,
    mainloop_of,
    scales_bytes,
    tiles_for,
)
from stretto.kernels.engine.fuse import Refs, fuse
from stretto.kernels.engine.hopper import tile_config
from stretto.kernels.engine.orders import RowTilesOrder
from stretto.kernels.engine.parts import Load, Parts, Product, Ref, Scales, Sink, Stream, Tile
from stretto.kernels.engine.scales import Scaling, load_arranged_rows, window_of_rows
from stretto.kernels.engine.segments import Segments
from stretto.kernels.engine.shared_memory import SMEM_BYTES
from stretto.kernels.engine.tiles import rhs_window
from stretto.kernels.fused import copied
from stretto.kernels.fused.group_tables import ALIGNED, row_tiles
from stretto.kernels.fused.obstacles import obstacle
from stretto.kernels.operation import Call, Kernel
from stretto.kernels.problem.machine import HOPPER
from stretto.kernels.problem.problem import Problem

MANY_ROWS = 1024
"""Of a group, for tiles of 256 rows: an eighth of them is half a tile."""

NARROW_TAKES = 1.06
"""Time of a narrow tile over that of as many columns of a large one, at most: 1.00 to 1.07 at six
sizes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The configuration of the kernel.

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
        """The configurations that the tuner tries, likely ones first."""
        tiles = tiles_for(problem)
        for tile in dict.fromkeys((*tiles.large_ones, tiles.narrow)):
            for raster_width in (16, 4, 8):
                yield Config(tiles=dataclasses.replace(tile, raster_width=raster_width))


def default_config(problem: Problem) -> Config:
    """The configuration for a problem that no table has.

    A group of any number of rows leaves half a tile empty on average. Where the waves of narrow
    tiles take less time, they are faster: on an H200 they took 51 us where large ones took 62, and
    705 where 831, 4 waves of half the columns and 3.
    """
    tiles, groups = tiles_for(problem), problem.sizes["g"]
    rows, machine = problem.sizes["m"] // groups, problem.machine

    def columns_of_waves(tile: TileConfig) -> int:
        most = ceil_div(problem.sizes["m"], tile.tile_m) + groups - 1  # rows of tiles
        count = most * ceil_div(problem.sizes["n"], tile.tile_n)
        return ceil_div(count, machine.multiprocessors) * tile.tile_n

    is_known = machine.architecture == HOPPER and problem.types.scales is None
    narrow, large = columns_of_waves(tiles.narrow), columns_of_waves(tiles.large)
    if is_known and narrow * NARROW_TAKES < large:
        return Config(tiles=tiles.narrow)
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
        zeros=call.options.zeros,
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
    zeros: bool = True,
    interpret: Any,
) -> jax.Array:
    """The product on padded operands (`padding`): `[m, k]`, `[g, k, n]` and `[g]` -> `[m, n]`.

    With `scaling`, rhs's scales have one more group. Rows of no group are zero, or not stored.
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
            table=row_tiles(sizes, m, tiles.tile_m, grouped.most, of_groups=not zeros),
            **({} if scaling is None else scaling.operands()),
        ),
        outs=dict(out=jax.ShapeDtypeStruct((m, grouped.n), out_dtype)),
        interpret=interpret,
    )["out"]


@dataclasses.dataclass(frozen=True)
class GroupedRows:
    """Rows in groups times the matrix of their group, as parts without the source of the rows.

    The kernel's refs have `table` (`row_tiles`), `rhs` and `out`.

    Attributes:
      most: the largest number of row tiles.
      k, n: of a group's matrix, padded.
      groups: their number.
      tiles: of the matmul.
      rhs_transposed: whether rhs is `[g, n, k]`.
    """

    most: int
    k: int
    n: int
    groups: int
    tiles: TileConfig
    rhs_transposed: bool

    @classmethod
    def of(cls, m: int, rhs: jax.Array, tiles: TileConfig, rhs_transposed: bool) -> GroupedRows:
        """The parts for `m` rows and a padded rhs, `[g, k, n]` or transposed."""
        groups, k, n = rhs.shape[0], *(rhs.shape[:0:-1] if rhs_transposed else rhs.shape[1:])
        return cls(ceil_div(m, tiles.tile_m) + groups + 1, k, n, groups, tiles, rhs_transposed)

    @property
    def num_tiles(self) -> int:
        """The largest number of tiles."""
        return self.most * ceil_div(self.n, self.tiles.tile_n)

    def lhs_window(self, tile: Tile, k: Int) -> tuple:
        """The window of a tile's rows in `[m, k]`."""
        tiles = self.tiles
        return pl.ds(_first_row(tile), tiles.tile_m), pl.ds(k * tiles.tile_k, tiles.tile_k)

    def rhs_window(self, tile: Tile, k: Int) -> tuple:
        """Where the matrix of a tile's group lies in rhs."""
        return _group(tile), *rhs_window(self.tiles, k, tile.n, self.rhs_transposed)

    def order(self, refs: Refs, n_tiles: int) -> RowTilesOrder:
        """The tiles of `n_tiles` columns of tiles."""
        return RowTilesOrder(
            refs.table[self.most, 0],
            self.most,
            n_tiles,
            self.tiles,
            facts=lambda m: tuple(refs.table[m, fact] for fact in range(4)),
        )

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

        return Parts(
            order=self.order(refs, ceil_div(n, tiles.tile_n)),
            ahead=True,
            k_tiles=lambda tile: where(
                _group(tile) < self.groups, ceil_div(self.k, tiles.tile_k), 0
            ),
            lhs=lhs,
            rhs=streams.of(refs.rhs, self.rhs_window),
            sink=Sink(store=store, rows=lambda tile: (tile.facts[2], tile.facts[3])),
        )

    def scales(self, refs: Refs, scaling: Scaling) -> Scales:
        """The loads of the scales of the rows and of their group's matrix."""
        columns = Segments.of([self.n], self.tiles.tile_n)
        leading = lambda tile: (_group(tile),)  # noqa: E731

        if scaling.granularity == "mx":  # Tile by tile (`_rows_of_tiles`).
            load = load_arranged_rows(lambda _: refs.lhs_scales, self.tiles)
        else:
            load = self.scales_of_rows(refs)
        return scaling.parts(load, refs.rhs_scales, columns, self.tiles, leading)

    def scales_of_rows(self, refs: Refs) -> Load:
        """Loads the scales of a tile's rows, or those of their blocks along the contraction."""

        def load(tile: Tile, k: Int, stage: Ref, barrier: Ref) -> None:
            window = window_of_rows(_first_row(tile), stage, self.tiles)
            plgpu.copy_gmem_to_smem(refs.lhs_scales.at[k, window], stage, barrier)

        return load


def _group(tile: Tile) -> Int:
    return tile.facts[0]


def _first_row(tile: Tile) -> Int:
    return tile.facts[1] * ALIGNED


KERNEL = Kernel(
    Config=Config,
    run=run,
    obstacle=obstacle,
    default=default_config,
    candidates=Config.candidates,
    copies=copied.one_device,
)
