"""An epilogue with arrays, or of two products (`parts.BesideParts`), on Hopper.

| barrier | arrives | waits | count | proves |
|---|---|---|---|---|
| `beside_full` | the copy of each vector | multiplying warpgroups | vectors | the tile's vectors are there |
| `beside_empty` | multiplying warpgroups | loading warp | 2 | both have read the vectors |
| `beside_loaded[buffer]` | both copies into it | multiplying warpgroups | 2 | a buffer of the store holds a piece of the matrix |

A piece of the matrix is loaded into the buffer from which the same piece of the result is stored: the
warpgroup reads it, and overwrites it with the result. Along a long contraction the loading warp loads
one piece after another (`pace`), so that they come between stages and not all at once; it waits for
`free` (`pieces`). Otherwise the storing warp loads the first pieces of a tile once the previous tile's
stores have read the buffers: during the products.

Vectors are loaded after a tile's last stage, as scales are (`scaling`).
"""  # noqa: E501

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed.schedule import Int, div, rem
from stretto.kernels.engine import joining
from stretto.kernels.engine.hopper.pieces import Pieces
from stretto.kernels.engine.hopper.tile_config import TileConfig
from stretto.kernels.engine.parts import Beside, BesideParts, Parts, Ref, Tile

FULL, EMPTY, LOADED = "beside_full", "beside_empty", "beside_loaded"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Applying:
    """The epilogue, with the memory and the barriers of its arrays.

    Attributes:
      beside, parts: the description of its arrays, and the function.
      pieces: of the result.
      vectors: in shared memory, `[tile_m]` of rows and the result's `[tile_n]` of columns.
      full, empty: barriers of the vectors; None where there are none.
      loaded: barriers of the matrix's pieces, one a buffer; None without a matrix.
      pace: tiles along the contraction after which the loading warp loads one more piece of the
        matrix; 0 where the storing warp loads all of them before.
    """

    beside: Beside
    parts: BesideParts
    pieces: Pieces
    vectors: Sequence[Ref]
    full: Ref
    empty: Ref
    loaded: Ref
    pace: int = 0

    def load_of_stage(self, tile: Tile, k: jax.Array) -> None:
        """Called in the loading warp after each stage of a tile, with a `pace`."""
        index = div(k, self.pace) - 1
        due = (rem(k, self.pace) == 0) & (index >= 0) & (index < self.pieces.num_buffers)
        pl.when(due)(lambda: self._load_when_free(tile, index))

    def load_of_tile(self, i: Int, tile: Tile) -> None:
        """Called in the loading warp, after the stages of the block's `i`-th tile."""
        if self.pace:  # The pieces that have no buffer until others are handed over.
            for index in range(self.pieces.num_buffers, len(self.pieces.places)):
                self._load_when_free(tile, index)
        self.load_vectors(i, tile)

    def _load_when_free(self, tile: Tile, index: Int) -> None:
        # The stores of the piece that was in the buffer have read it.
        plgpu.barrier_wait(self.pieces.free.at[rem(index, self.pieces.num_buffers)])
        self.load_piece(tile, index)

    def load_vectors(self, i: Int, tile: Tile) -> None:
        """Called in the loading warp, after the stages of the block's `i`-th tile."""
        if self.vectors:
            joining.unless_given(tile, lambda: self._load_vectors(i, tile))

    def _load_vectors(self, i: Int, tile: Tile) -> None:
        # Both multiplying warpgroups have read the vectors of the tile before.
        pl.when(i > 0)(lambda: plgpu.barrier_wait(self.empty))
        for load, vector in zip(self.parts.vectors, self.vectors, strict=True):
            # Each copy, once complete, publishes its vector to the multiplying warpgroups.
            load(tile, jnp.int32(0), vector, self.full)

    def load_piece(self, tile: Tile, index: Int) -> None:
        """Loads a piece of the matrix to its buffer, in both halves; called in one warp.

        The matrix has the result's shape and type, so a piece is loaded as it is stored.
        """
        pieces, buffer = self.pieces, rem(index, self.pieces.num_buffers)
        for half in range(pieces.config.warpgroups):
            row, column = pieces.within_tile(pieces.place(index), half)
            window = self.parts.window(tile, row, pieces.rows, column, pieces.columns)  # pyright: ignore[reportOptionalCall]
            plgpu.copy_gmem_to_smem(window, pieces.stored.at[half, buffer], self.loaded.at[buffer])

    def begin(self) -> None:
        """Called in a multiplying warpgroup before the first piece of a tile."""
        if self.vectors:
            # All copies of the tile's vectors are complete.
            plgpu.barrier_wait(self.full)

    def end(self) -> None:
        """Called there after the last piece of a tile."""
        if self.vectors:
            # Publishes to the loading warp that this warpgroup has read the vectors.
            plgpu.barrier_arrive(self.empty)

    def wait_for_buffer(self, buffer: int) -> None:
        """Called there before a piece: returns once its buffer may be written."""
        if self.beside.has_matrix:
            # Both copies into the buffer are complete, and so are the stores that came before them.
            plgpu.barrier_wait(self.loaded.at[buffer])
        else:
            # The stores of the piece that was in the buffer have read it.
            plgpu.barrier_wait(self.pieces.free.at[buffer])

    def piece(
        self, total: Callable[[slice, slice], jax.Array], index: int, half: jax.Array
    ) -> jax.Array:
        """The piece of the result at `index`; in float32.

        `total` is called with rows and columns of this warpgroup's total.
        """
        pieces, place = self.pieces, self.pieces.places[index]
        rows, columns = pieces.within_half(place)
        products = [total(rows, columns)]
        if self.beside.gated:
            width = pieces.config.tile_n // 2
            products.append(total(rows, slice(columns.start + width, columns.stop + width)))
        first_row, first_column = pieces.within_tile(place, half)
        vectors = iter(self.vectors)
        seen = []
        for kind in self.beside.kinds:
            if kind == "elements":
                matrix = pieces.out.at[half, index % pieces.num_buffers][...]
                seen.append(matrix.astype(jnp.float32))
                continue
            along = 0 if kind == "rows" else 1
            first, size = ((first_row, pieces.rows), (first_column, pieces.columns))[along]
            layout = plgpu.Layout.WGMMA.reduce(1 - along)
            vector = next(vectors).at[pl.ds(first, size)]
            vector = plgpu.load(vector, layout=layout, optimized=False)
            seen.append(lax.broadcast_in_dim(vector, products[0].shape, (along,)))
        return self.parts.function(*products, *seen)


def scratch(config: TileConfig, beside: Beside, columns: int) -> dict[str, Any]:
    """The vectors and the barriers, by name, for `kernel.launch`; `columns` of a result's tile."""
    sizes = {"rows": config.tile_m, "columns": columns}
    found: dict[str, Any] = {
        _name(i): plgpu.SMEM((sizes[kind],), jnp.float32) for i, kind in enumerate(beside.vectors)
    }
    if beside.vectors:
        found[FULL] = plgpu.Barrier(num_arrivals=len(beside.vectors))
        found[EMPTY] = plgpu.Barrier(num_arrivals=config.warpgroups)
    if beside.has_matrix:
        found[LOADED] = plgpu.Barrier(
            num_arrivals=config.warpgroups, num_barriers=config.store_buffers
        )
    return found


def applying(
    beside: Beside, parts: Parts, pieces: Pieces, scratch: Mapping[str, Ref]
) -> Applying | None:
    """With the refs of `scratch`; None for a kernel without an epilogue that takes more."""
    if parts.beside is None:
        return None
    return Applying(
        beside=beside,
        parts=parts.beside,
        pieces=pieces,
        vectors=[scratch[_name(i)] for i in range(len(beside.vectors))],
        full=scratch.get(FULL),
        empty=scratch.get(EMPTY),
        loaded=scratch.get(LOADED),
        pace=_pace(beside, pieces, parts.k_tiles),
    )


def _pace(beside: Beside, pieces: Pieces, k_tiles: Any) -> int:
    """`Applying.pace`, evenly along the contraction.

    There is none where a piece would come before the ring is full of this tile's stages: the tile
    before may not be handed over yet, and the loading warp would wait for that. And none for pairs,
    whose stages take so many copies that the loading warp has no registers to spare.
    """
    if not beside.has_matrix or beside.gated or not isinstance(k_tiles, int):
        return 0
    pace = k_tiles // (pieces.num_buffers + 1)
    return pace if pace > pieces.config.num_stages else 0


def _name(index: int) -> str:
    return f"beside_{index}"
