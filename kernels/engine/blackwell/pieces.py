"""Pieces of a tile, and the buffers in shared memory through which they leave the registers.

| barrier | arrives | waits | proves |
|---|---|---|---|
| `filled[buffer]` | draining warpgroup | storing warp | the piece is in the buffer |
| `free[buffer]` | storing warp | draining warpgroup | its stores have read the buffer |

A piece is 128 rows x 128 bytes. Of a ragged product a piece that is stored in part lies in its
buffer row by row, without a swizzle (`partial`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed.schedule import Int
from stretto.kernels.engine import partial
from stretto.kernels.engine.blackwell.tile_config import LANES, TileConfig
from stretto.kernels.engine.parts import Product, Ref, Sink, Tile
from stretto.kernels.engine.shared_memory import row_elements, swizzled


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pieces:
    """The pieces of a block's rows of a tile of `config`; `row` is their first within the tile.

    `out` are the buffers, `[buffers, rows, columns]`; `edge` are the same bytes without a swizzle,
    None unless the product is ragged.
    """

    config: TileConfig
    row: Int
    out: Ref
    edge: Ref | None
    filled: Ref
    free: Ref

    @property
    def columns(self) -> int:
        """Columns of a piece."""
        return self.out.shape[2]

    @property
    def places(self) -> range:
        """The first columns of the pieces of a tile, in the order of their stores."""
        return range(0, self.config.tile_n, self.columns)

    @property
    def num_buffers(self) -> int:
        """Buffers that are in use: at most one for each piece."""
        return min(self.config.store_buffers, len(self.places))

    def fill(self, sink: Sink, tile: Tile, buffer: int, piece: jax.Array) -> None:
        """Writes a piece to its buffer."""
        piece = piece.astype(self.out.dtype)
        if self.edge is None:
            self.out.at[buffer][...] = piece
            return
        edge = self.edge.at[buffer]
        first, end = partial.stored_rows(sink, tile, self.row, LANES)

        @pl.when(end - first == LANES)
        def _():
            self.out.at[buffer][...] = piece

        @pl.when(end - first < LANES)
        def _():
            edge[...] = piece

    def store(self, sink: Sink, tile: Tile, buffer: int, place: int) -> None:
        """Starts the copies of the piece at column `place` to where it goes."""
        whole = self.out.at[buffer]
        if self.edge is None:
            sink.store(tile, whole, self.row, place)
        else:
            partial.store(sink, tile, whole, self.edge.at[buffer], self.row, place)


def scratch(config: TileConfig, product: Product) -> dict[str, Any]:
    """The buffers and their barriers, by name, for `kernel.launch`."""
    buffers = config.store_buffers
    shape = buffers, LANES, row_elements(product.out)
    out = plgpu.SMEM(shape, product.out, transforms=swizzled(product.out))
    return dict(
        out_smem=plgpu.RefUnion(out, plgpu.SMEM(shape, product.out)) if product.ragged else out,
        filled=plgpu.Barrier(num_barriers=buffers),
        free=plgpu.Barrier(num_barriers=buffers),
    )
