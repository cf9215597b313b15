"""What a fused kernel adds to the shared matmul (`matmul.py`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from stretto.distributed.schedule import Int
from stretto.kernels.problem.epilogues import Epilogue


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gate:
    """Holds the loading warp back until lhs has arrived.

    Attributes:
      columns: of lhs between one gate and the next; a multiple of `tile_k`.
      wait: called in the looking-out warp, ahead of the loads, with (tile, index of the gate along
        k); returns once lhs may be loaded up to the next gate.
      before: called in that warp once, before all else.
    """

    columns: int
    wait: Callable[[Any, jax.Array], None]
    before: Callable[[], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Addends:
    """Matrices, of the result's type, that are added to some tiles' products in float32.

    Attributes:
      most: how many are added to a tile at most.
      count: tile -> how many are added to it.
      wait: called in the storing warp with (tile); returns once they may be read.
      window: (tile, index of the addend, first row, rows, first column, columns), within the tile
        -> the view of global memory that holds this part of the addend.
    """

    most: int
    count: Callable[[Any], Int]
    wait: Callable[[Any], None]
    window: Callable[..., Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hooks:
    """What a kernel makes of the matmul. A `tile` is whatever `locate` returns.

    Attributes:
      locate: index of a tile, in the order of work -> tile.
      load_lhs, load_rhs: called in the loading warp with (tile, index along k, slot of shared
        memory, barrier); starts the copy that fills the slot and arrives at the barrier.
      store: called in the storing warp with (tile, part of the result in shared memory, its first
        row and column within the tile); starts the copies to where it goes, in no group of copies.
      before_stores: called in the storing warp once, before its first tile.
      stored: called in the storing warp with (tile) once all its stores are complete, for what
        must follow, such as a signal.
      rhs_transposed: slots of rhs hold `[tile_n, tile_k]`.
      epilogue: elementwise function of the float32 product, applied before the store.
      addends: what is added to the product.
      communicate: runs in a warp of its own, beside everything else; returns when it is done.
      gate: what the loads of lhs wait for, if anything.
    """

    locate: Callable[[jax.Array], Any]
    load_lhs: Callable[..., None]
    load_rhs: Callable[..., None]
    store: Callable[..., None]
    before_stores: Callable[[], None] | None = None
    stored: Callable[[Any], None] | None = None
    rhs_transposed: bool = False
    epilogue: Epilogue | None = None
    addends: Addends | None = None
    communicate: Callable[[], None] | None = None
    gate: Gate | None = None
