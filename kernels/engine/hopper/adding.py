"""`parts.Addends` on Hopper: all but the last come into the sum between the products.

| barrier | arrives | waits | count | proves |
|---|---|---|---|---|
| `loaded[buffer]` | both copies into it, or the storing warp where a tile has no addend | multiplying warpgroups | 2 | the buffer holds an addend's piece, or is free |
| `added[buffer]` | multiplying warpgroups | storing warp | 2 | they have read the addend's piece |

The buffers are those of the store (`pieces`), which addends come through before the result leaves
through them. The last addend is added piece by piece as a tile is handed over: to add between
products the tensor cores must first be done with what is under way. A piece of the result is then
stored from the buffer in which the addend's piece lay.
"""  # noqa: E501

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed.kernel import THREAD_AXIS
from stretto.distributed.schedule import Int, div, where
from stretto.kernels.engine.block import Block
from stretto.kernels.engine.hopper.folding import Folding
from stretto.kernels.engine.hopper.pieces import Pieces
from stretto.kernels.engine.hopper.products import Products
from stretto.kernels.engine.hopper.tile_config import TileConfig
from stretto.kernels.engine.parts import Addends, Ref, Tile


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adding:
    """`parts.Addends`: a tile's contraction is done in stretches, with an addend after each."""

    block: Block
    products: Products
    pieces: Pieces
    addends: Addends
    loaded: Ref
    added: Ref
    scaling: Folding | None = None

    def total(
        self, tile: Tile, stage: jax.Array, under: Sequence[Callable[[], None]] = ()
    ) -> tuple[jax.Array, jax.Array]:
        """The sum of products and all addends but the last, in this warpgroup's rows.

        And the next stage. Under each stretch the storing warp loads the next addend. With fewer
        tiles along the contraction than stretches, all addends come at the end; and so they do
        where the products are scaled (`scaling`), which addends are not.
        """
        if self.scaling is not None:
            return self._after(self.scaling, tile, stage, under)
        k_tiles = self.block.k_tiles(tile)
        stretch = div(k_tiles, self.addends.most)
        count = self._before_last(tile)
        first = k_tiles - count * stretch  # The first stretch takes what the others leave.

        def multiply(acc: Ref) -> tuple[jax.Array, jax.Array]:
            def add_and_multiply(number: jax.Array, stage: jax.Array) -> jax.Array:
                with jax.named_scope("add"):
                    # Reading `acc` waits for the products that are under way.
                    acc[...] = self._sum(acc[...])
                k = first + number * stretch
                return self.products.add(acc, k, k + stretch, stage)

            following = self.products.add(acc, 0, first, stage, under)
            following = lax.fori_loop(0, count, add_and_multiply, following)
            return acc[...], following

        total, stage = pl.run_scoped(multiply, self.products.accumulator())
        self.products.release_last(k_tiles, stage)
        return total, stage

    def _after(
        self,
        scaling: Folding,
        tile: Tile,
        stage: jax.Array,
        under: Sequence[Callable[[], None]],
    ) -> tuple[jax.Array, jax.Array]:
        """The total of scaled products, and then all addends but the last."""
        total, stage = scaling.total(tile, stage, under)

        def add(_: jax.Array, total: jax.Array) -> jax.Array:
            return self._sum(total)

        with jax.named_scope("add"):
            return lax.fori_loop(0, self._before_last(tile), add, total), stage

    def _before_last(self, tile: Tile) -> Int:
        """The number of a tile's addends but for the last."""
        if self.addends.most == 1:
            return 0
        before_last = jnp.maximum(self.addends.count(tile) - 1, 0)
        # To what a block makes of another's tile, that one adds them.
        return before_last if tile.part is None else where(tile.part.gives == 1, 0, before_last)

    def add_last(self, piece: jax.Array, tile: Tile, index: int, half: jax.Array) -> jax.Array:
        """A piece of a tile's total, and of its last addend, if it has one.

        Called once for each piece of a warpgroup's half, before the piece's buffer is written.
        """
        buffer = index % self.pieces.num_buffers
        # Both copies into the buffer are complete, or it is free.
        plgpu.barrier_wait(self.loaded.at[buffer])

        def add(_: jax.Array, piece: jax.Array) -> jax.Array:
            return piece + self.pieces.out.at[half, buffer][...].astype(jnp.float32)

        return lax.fori_loop(0, jnp.minimum(self.addends.count(tile), 1), add, piece)

    def _sum(self, total: jax.Array) -> jax.Array:
        """`total` and the next addend, in the pieces that the storing warp brings."""
        pieces, sums = self.pieces, []
        for index, place in enumerate(pieces.places):
            buffer = index % pieces.num_buffers
            # Both copies into the buffer are complete.
            plgpu.barrier_wait(self.loaded.at[buffer])
            addend = pieces.out.at[lax.axis_index(THREAD_AXIS), buffer][...].astype(jnp.float32)
            sums.append(total[pieces.within_half(place)] + addend)
            plgpu.commit_smem()  # It has been read before the copy engine writes the next one.
            # Publishes to the storing warp that this half of the buffer has been read.
            plgpu.barrier_arrive(self.added.at[buffer])
        # The pieces lie row by row: put each row together, and the rows below each other.
        in_a_row = self.products.config.tile_n // pieces.columns
        rows = [jnp.concatenate(row, axis=1) for row in itertools.batched(sums, in_a_row)]
        return jnp.concatenate(rows) if len(rows) > 1 else rows[0]

    def bring(self, tile: Tile) -> None:
        """Copies the pieces of all addends but the last into the buffers, as they come free.

        The buffers are free at first: this warp has stored the tile before from them, and the
        warpgroups hand this one over only after they have added.
        """
        num_buffers, count = self.pieces.num_buffers, self._before_last(tile)
        pl.when(self.addends.count(tile) > 0)(lambda: self.addends.wait(tile))

        def bring_one(number: jax.Array, _: None) -> None:
            for index, place in enumerate(self.pieces.places):
                buffer = index % num_buffers

                @pl.when((number > 0) | (index >= num_buffers))
                def _(buffer=buffer):
                    # Both warpgroups have read the piece that was in the buffer.
                    plgpu.barrier_wait(self.added.at[buffer])

                self._bring_piece(tile, number, place, buffer)

        if self.addends.most == 1:
            return

        @pl.when(count > 0)
        def _():
            lax.fori_loop(0, count, bring_one, None)
            for buffer in range(num_buffers):
                # Both warpgroups have read the last pieces: the results may come.
                plgpu.barrier_wait(self.added.at[buffer])

    def bring_last(self, tile: Tile, index: int) -> None:
        """Copies a piece of the last addend into its buffer, which is free.

        Of a tile without addends the warpgroups are told that it is free.
        """
        buffer, place = index % self.pieces.num_buffers, self.pieces.places[index]
        count = self.addends.count(tile)
        pl.when(count > 0)(lambda: self._bring_piece(tile, count - 1, place, buffer, is_last=True))

        @pl.when(count == 0)
        def _():
            for _ in range(self.pieces.config.warpgroups):
                plgpu.barrier_arrive(self.loaded.at[buffer])

    def _bring_piece(
        self,
        tile: Tile,
        number: Int,
        place: tuple[int, int],
        buffer: int,
        *,
        is_last: bool = False,
    ) -> None:
        """Starts the copies of both halves of a piece; each publishes its half once complete."""
        pieces, addends = self.pieces, self.addends
        apart = addends.last if is_last else None
        for half in range(pieces.config.warpgroups):
            row, column = pieces.within_tile(place, half)
            piece = row, pieces.rows, column, pieces.columns
            if apart is None:
                window, buffers = addends.window(tile, number, *piece), pieces.out
            else:
                window, buffers = apart(tile, *piece), pieces.stored
            plgpu.copy_gmem_to_smem(window, buffers.at[half, buffer], self.loaded.at[buffer])


def scratch(config: TileConfig) -> dict[str, Any]:
    """The barriers, by name, for `kernel.launch`."""
    buffers = config.store_buffers
    return dict(
        loaded=plgpu.Barrier(num_arrivals=config.warpgroups, num_barriers=buffers),
        added=plgpu.Barrier(num_arrivals=config.warpgroups, num_barriers=buffers),
    )
