"""Tiles that several blocks make together: their sums meet in the owner's registers.

| object | written or signalled by | waited for by | count | proves |
|---|---|---|---|---|
| `shared_sums[range]` | multiplying warpgroups that give | | | the sum of a stretch of a tile |
| barrier `given` | the same | their storing warp | warpgroups | their halves of the sum are in memory |
| `given_sums[tile]` | the storing warps of those that give | the owner's storing warp | givers | all of the tile's other sums are in memory |
| barrier `joined` | the owner's storing warp | its multiplying warpgroups | 1 | the same |

Warps that multiply wait for barriers of their block alone: where they wait for semaphores, the
assembler serialises the tensor cores. The memory is the device's own, float32, a tile for each
block that gives; it lies so that a warp's store or load is 256 bytes in one place. The owner's storing
warp, which alone waits for `given_sums[tile]`, leaves it at zero.
"""  # noqa: E501

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed.schedule import Int, div
from stretto.distributed.semaphores import Semaphore, SemaphoreArray
from stretto.kernels.engine.parts import Ref, Tile
from stretto.kernels.engine.remainder import Part, Remainder
from stretto.kernels.engine.tiles import TileShape

ROWS, COLUMNS = 64, 8
"""Of an accumulator, that lie in one place: a thread has 2 of the columns."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Joining:
    """What a block's roles need where tiles are shared.

    Attributes:
      remainder: who makes what.
      sums: `shared_sums`, `[ranges, tile_m / ROWS, tile_n / COLUMNS, ROWS, COLUMNS]`.
      given_sums: the semaphores, one a shared tile.
      given, joined: the barriers.
    """

    remainder: Remainder
    sums: Ref
    given_sums: Semaphore
    given: Ref
    joined: Ref

    def give(self, tile: Tile, total: jax.Array, first_row: Int) -> None:
        """Called in each multiplying warpgroup: stores its share of a sum, from `first_row` on."""
        rows, columns = total.shape
        for row, column in _blocks(rows, columns):
            place = self._place(_part(tile).given, first_row + row, column)
            place[...] = total[row : row + ROWS, column : column + COLUMNS]
        # Publishes this warpgroup's share to the storing warp.
        plgpu.barrier_arrive(self.given)

    def announce(self, tile: Tile) -> None:
        """Called in the storing warp of a block that gives."""
        # All its warpgroups have stored their shares.
        plgpu.barrier_wait(self.given)
        # Publishes the sum to the tile's owner.
        self.given_sums.at[_part(tile).number].signal()

    def gather(self, tile: Tile) -> None:
        """Called in the storing warp of a block that owns a tile, before its stores."""

        @pl.when(_part(tile).takes > 0)
        def _():
            # All other sums of the tile are in memory.
            self.given_sums.at[_part(tile).number].wait(_part(tile).takes, decrement=True)
            # Publishes that to the multiplying warpgroups.
            plgpu.barrier_arrive(self.joined)

    def await_others(self, tile: Tile) -> None:
        """Called in each multiplying warpgroup of the owner, before `joined_piece`."""
        # The storing warp has seen all other sums of the tile.
        pl.when(_part(tile).takes > 0)(lambda: plgpu.barrier_wait(self.joined))

    def joined_piece(self, piece: jax.Array, tile: Tile, row: Int, column: Int) -> jax.Array:
        """A piece of the owner's sum, at (`row`, `column`) of the tile, and of all others."""
        rows, columns = piece.shape
        takes = _part(tile).takes

        def taken(number: Int) -> jax.Array:
            def block(within: tuple[int, int]) -> jax.Array:
                place = _part(tile).given + number, row + within[0], column + within[1]
                return plgpu.load(self._place(*place), layout=plgpu.Layout.WGMMA, optimized=False)

            blocks = [block(within) for within in _blocks(rows, columns)]
            in_rows = itertools.batched(blocks, columns // COLUMNS)
            joined = [jnp.concatenate(one, axis=1) for one in in_rows]
            return jnp.concatenate(joined) if len(joined) > 1 else joined[0]

        def add_two(pair: jax.Array, piece: jax.Array) -> jax.Array:
            one, other = taken(2 * pair), taken(2 * pair + 1)  # Both on their way at once.
            return piece + one + other

        pairs = div(takes, 2)
        piece = lax.fori_loop(0, pairs, add_two, piece)
        return lax.fori_loop(2 * pairs, takes, lambda i, piece: piece + taken(i), piece)

    def _place(self, number: Int, row: Int, column: Int) -> Ref:
        """Where a block of `ROWS` x `COLUMNS` of a sum lies."""
        return self.sums.at[number, div(row, ROWS), div(column, COLUMNS)]


def either(tile: Tile, give: Callable[[], None], own: Callable[[], None]) -> None:
    """Calls `give` for a part of another block's tile, or else `own`."""
    if tile.part is None:
        own()
        return
    pl.when(tile.part.gives == 1)(give)
    pl.when(tile.part.gives == 0)(own)


def unless_given(tile: Tile, run: Callable[[], None]) -> None:
    """Calls `run`, but for a part of another block's tile."""
    if tile.part is None:
        run()
    else:
        pl.when(tile.part.gives == 0)(run)


def _part(tile: Tile) -> Part:
    if tile.part is None:
        raise ValueError(f"{tile} is no tile of a block that shares some.")
    return tile.part


def _blocks(rows: int, columns: int) -> list[tuple[int, int]]:
    return list(itertools.product(range(0, rows, ROWS), range(0, columns, COLUMNS)))


def memory(remainder: Remainder, shape: TileShape) -> jax.ShapeDtypeStruct:
    """The memory of `Joining.sums`, in bytes as large as a tile in float32 for each range."""
    blocks = shape.tile_m // ROWS, shape.tile_n // COLUMNS
    return jax.ShapeDtypeStruct((remainder.ranges, *blocks, ROWS, COLUMNS), jnp.float32)


def semaphores(remainder: Remainder) -> SemaphoreArray:
    """One for each tile that is shared."""
    return SemaphoreArray((remainder.tiles,), local=True, restored=True)


def scratch(warpgroups: int) -> dict[str, Any]:
    """The barriers, by name, for `kernel.launch`."""
    return dict(given=plgpu.Barrier(num_arrivals=warpgroups), joined=plgpu.Barrier())
