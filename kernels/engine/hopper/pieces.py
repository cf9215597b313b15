"""Pieces of a tile, and the buffers in shared memory through which they leave the registers.

| barrier | arrives | waits | count | proves |
|---|---|---|---|---|
| `filled[buffer]` | multiplying warpgroups | storing warp | 2 | both halves of a piece are in the buffer |
| `free[buffer]` | storing warp | multiplying warpgroups | 1 | its stores have read the buffer |

Each multiplying warpgroup holds half the rows of a tile. A piece is 64 rows x 128 bytes of either
half; it goes through one of the `store_buffers` buffers, which are taken in turn. Of a ragged
product a piece that is stored in part lies in its buffer row by row, without a swizzle: of a swizzled
one the copy engine takes no fewer than 8 rows.
"""  # noqa: E501

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed.schedule import Int, div, rem
from stretto.kernels.engine import partial
from stretto.kernels.engine.hopper.tile_config import PIECE_ROWS, TileConfig
from stretto.kernels.engine.parts import Product, Ref, Sink, Tile
from stretto.kernels.engine.shared_memory import row_elements, swizzled, with_edges


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pieces:
    """The pieces of a tile of `config`.

    `out` are the buffers, `[2, buffers, rows, columns]`; `stored` are the same, as they are copied
    to the result; `edge` are the same bytes without a swizzle, None unless the product is ragged.
    `row` is the block's first row of a tile, and `width` are the columns of a tile of the result.
    """

    config: TileConfig
    row: Int
    width: int
    out: Ref
    stored: Ref
    edge: Ref | None
    filled: Ref
    free: Ref

    @property
    def places(self) -> list[tuple[int, int]]:
        """(first row, first column) of the pieces of a half tile, in the order of their stores."""
        down, across = (
            range(0, self.half_rows, self.rows),
            range(0, self.width, self.columns),
        )
        return list(itertools.product(down, across))

    @property
    def rows(self) -> int:
        """Rows of a piece."""
        return self.out.shape[2]

    @property
    def columns(self) -> int:
        """Columns of a piece."""
        return self.out.shape[3]

    @property
    def half_rows(self) -> int:
        """Rows of a tile that a multiplying warpgroup holds."""
        return self.config.rows // self.config.warpgroups

    @property
    def num_buffers(self) -> int:
        """Buffers that are in use: at most one for each piece."""
        return min(self.config.store_buffers, len(self.places))

    def stored_rows(
        self, sink: Sink, tile: Tile, place: tuple[int, int], half: Int
    ) -> tuple[Int, Int]:
        """(first row, row after the last one) of a piece of a ragged product that are stored."""
        row, _ = self.within_tile(place, half)
        return partial.stored_rows(sink, tile, row, self.rows)

    def store(self, sink: Sink, tile: Tile, buffer: int, place: tuple[int, int]) -> None:
        """Starts the copies of a piece of both halves, or of those of its rows that are stored."""
        for half in range(self.config.warpgroups):
            row, column = self.within_tile(place, half)
            whole = self.stored.at[half, buffer]
            if self.edge is None:
                sink.store(tile, whole, row, column)
            else:
                partial.store(sink, tile, whole, self.edge.at[half, buffer], row, column)

    def place(self, index: Int) -> tuple[Int, Int]:
        """The place at an index, which may be known in the kernel alone."""
        if isinstance(index, int):
            return self.places[index]
        across = self.width // self.columns
        return div(index, across) * self.rows, rem(index, across) * self.columns

    def within_half(self, place: tuple[int, int]) -> tuple[slice, slice]:
        """A piece as rows and columns of its half of the tile."""
        row, column = place
        return slice(row, row + self.rows), slice(column, column + self.columns)

    def within_tile(self, place: tuple[Int, Int], half: Int) -> tuple[Int, Int]:
        """(first row, first column) in the tile of a piece of a half."""
        row, column = place
        return self.row + half * self.half_rows + row, column


def scratch(config: TileConfig, product: Product) -> dict[str, Any]:
    """The buffers and their barriers, by name, for `kernel.launch`."""
    buffers = config.store_buffers
    shape = config.warpgroups, buffers, PIECE_ROWS, row_elements(product.out)
    out = plgpu.SMEM(shape, product.out, transforms=swizzled(product.out))
    if product.out_edges:
        out = with_edges(shape, product.out)
    elif product.ragged:
        out = plgpu.RefUnion(out, plgpu.SMEM(shape, product.out))
    return dict(
        out_smem=out,
        filled=plgpu.Barrier(num_arrivals=config.warpgroups, num_barriers=buffers),
        free=plgpu.Barrier(num_barriers=buffers),
    )


def views(out: Ref, product: Product) -> tuple[Ref, Ref, Ref | None]:
    """The buffers as warps use them, as they are stored, and for what is stored in part."""
    if product.out_edges:
        filled, stored = out
        return filled, stored, None
    if product.ragged:
        filled, edge = out
        return filled, filled, edge
    return out, out, None
