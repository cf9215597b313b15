"""How well tiles fill the multiprocessors: the waves of a product's tiles, and the time they take.

Every block makes one tile at a time; all of them together make a *wave*. The last wave is seldom
full, and takes as long as the others, unless blocks share its tiles (`remainder`). Tiles of another
width divide the result differently, and may leave less of the last wave empty.
"""

from __future__ import annotations

import dataclasses

from stretto.distributed.schedule import ceil_div
from stretto.kernels.engine import remainder
from stretto.kernels.engine.remainder import Remainder
from stretto.kernels.engine.shared_memory import SWIZZLE_BYTES
from stretto.kernels.engine.tiles import TileShape
from stretto.kernels.problem.problem import Problem

COSTS = {192: 0.99, 128: 1.01}
"""Time of an element of the result in tiles of so many columns, over that in tiles of 256, where
products are long. On two H200s own matmuls took 0.99 to 1.00 of it with 192, and 1.01 with 128."""
LARGE_LOADS = 1 / 128 + 1 / 256
"""Rows and columns that a tile of 128 x 256 loads, over its elements. Where rows of operands begin
within a line of the L2, loads limit the product: an all-reduce of 6610 x 12796 x 2442 took 1.3 of
the time with 128 columns, whose waves are as long, an all-gather of 1000 x 3072 x 8208 1.2 with 192
and 1.4 with 256."""
PAIR = 1.2
"""Time of a pair's tile over that by its loads: two blocks wait for each other. On two H200s a pair
took 1.05 of the time of two blocks at 1024 x 3072 x 8192, and 0.93 at 1000 x 3072 x 8208."""
STEPS_IN_A_US, SENT_IN_A_US = 128 * 256 / 0.7, 245e3
"""Elements of results that a multiprocessor adds a step of `tile_k` to, and bytes that one device
sends beside a matmul, in a microsecond."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """A result that is made in tiles: `shards` of `rows` x `columns`, on so many multiprocessors.

    A tile has rows of one shard. `in_lines`: rows of both operands are multiples of 128 bytes, and
    `rhs_in_lines`: of rhs. `k`: the length of the contraction on a device; None for products whose
    tiles blocks do not share.
    """

    shards: int
    rows: int
    columns: int
    multiprocessors: int
    in_lines: bool = True
    rhs_in_lines: bool = True
    k: int | None = None

    @classmethod
    def of(cls, problem: Problem, columns: int, k: int) -> Result:
        """Of a matmul whose rows have an owner each: `columns` and `k` are those of one device."""
        return cls(
            shards=problem.devices,
            rows=ceil_div(problem.sizes["m"], problem.devices),
            columns=columns,
            multiprocessors=problem.machine.multiprocessors,
            in_lines=_fills_lines(k, problem) and _fills_lines(columns, problem),
            rhs_in_lines=_fills_lines(columns, problem),
            k=k,
        )

    def waves(self, tile: TileShape) -> int:
        """Of all shards, in tiles of this shape."""
        return ceil_div(self.tiles(tile), self.multiprocessors // tile.blocks)

    def tiles(self, tile: TileShape) -> int:
        """Of all shards, of this shape."""
        of_a_shard = ceil_div(self.rows, tile.tile_m) * ceil_div(self.columns, tile.tile_n)
        return self.shards * of_a_shard

    def shares(self, tile: TileShape) -> bool:
        """Whether blocks share tiles of the last wave."""
        return self._remainder(tile) is not None

    def _remainder(self, tile: TileShape) -> Remainder | None:
        if self.k is None or not self.in_lines or tile.blocks > 1:  # There it was not measured.
            return None
        sharing = remainder.sharing_of(tile, ceil_div(self.k, tile.tile_k))
        return remainder.remainder_of(self.tiles(tile), self.multiprocessors, sharing)

    def _waves_of_time(self, tile: TileShape) -> float:
        """The waves, of which the last one is shorter if its tiles are shared."""
        waves, shared = self.waves(tile), self._remainder(tile)
        return waves if shared is None else waves - 1 + remainder.time(shared) / shared.steps

    def time(self, tile: TileShape) -> float:
        """Of the waves: elements of tiles that a multiprocessor makes, as if of 256 columns."""
        if self.in_lines:
            cost = COSTS.get(tile.tile_n, 1.0)
        else:
            cost = (1 / tile.tile_m + 1 / tile.tile_n) / LARGE_LOADS
        if tile.blocks > 1:
            cost *= PAIR
        return self._waves_of_time(tile) * (tile.tile_m // tile.blocks) * tile.tile_n * cost

    def us(self, tile: TileShape, k: int) -> float:
        """Microseconds of the waves, where products are along `k`."""
        return self.time(tile) * ceil_div(k, tile.tile_k) / STEPS_IN_A_US


def _fills_lines(columns: int, problem: Problem) -> bool:
    """Whether rows of so many columns are multiples of 128 bytes."""
    return columns * problem.types.itemsize % SWIZZLE_BYTES == 0
