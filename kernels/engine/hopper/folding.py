"""How the products of a tile become its total: the place where another arithmetic plugs in.

A `Folding` is made for each kind of `parts.Fold` (`matmul.Matmul.folding`). It owns the loop over
the contraction, and so decides what happens between products: nothing (`Summing`), a scale for each
of them, or something that the storing warp brings (`adding.Adding`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

import jax
from jax.experimental import pallas as pl

from stretto.kernels.engine.block import Block
from stretto.kernels.engine.hopper.products import Products
from stretto.kernels.engine.parts import Ref, Tile


class Folding(Protocol):
    """Makes totals."""

    def total(
        self, tile: Tile, stage: jax.Array, under: Sequence[Callable[[], None]] = (), /
    ) -> tuple[jax.Array, jax.Array]:
        """Called in a multiplying warpgroup: its half of the tile's total, and the next stage.

        It waits for each stage from `stage` on to be full, and releases each once. `under[k]` is
        called once, where product `k` of the tile may hide what it does.
        """
        ...

    def bring(self, tile: Tile, /) -> None:
        """Called in the storing warp before it stores the tile: brings what `total` waits for."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summing:
    """`parts.Sum`: the products are added up in the accumulator."""

    block: Block
    products: Products

    def total(
        self, tile: Tile, stage: jax.Array, under: Sequence[Callable[[], None]] = ()
    ) -> tuple[jax.Array, jax.Array]:
        """The sum of the tile's products, in this warpgroup's rows; and the next stage."""
        k_tiles = self.block.k_tiles(tile)

        def multiply(acc: Ref) -> tuple[jax.Array, jax.Array]:
            following = self.products.add(acc, 0, k_tiles, stage, under)
            return acc[...], following

        total, stage = pl.run_scoped(multiply, self.products.accumulator())
        self.products.release_last(k_tiles, stage)
        return total, stage

    def bring(self, tile: Tile) -> None:
        """Nothing is needed."""
