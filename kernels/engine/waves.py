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

COSTS = {192: 0.99, 128: 1.01, 64: 1.55}
"""Time of an element of the result in tiles of so many columns, over that in tiles of 256, where
products are long. On two H200s own matmuls took 0.99 to 1.00 of it with 192, and 1.01 with 128; of
64 columns fused ones took 0.64 of the time of 128."""
LOAD = 52.0
"""Time of an element of the result by loads alone, over that by products: so much for each row and
column that its tile loads a step, over the tile's elements. A row of lhs that begins within a line
of the L2 counts as `LHS_WITHIN`, a row of rhs as `RHS_WITHIN`."""
LHS_WITHIN, RHS_WITHIN = 2.0, 2.5
SHARPNESS = 8
"""How suddenly loads limit what products limited before. The four were fitted to products alone on
one H200, of rows that begin within a line, over those of even sizes in tiles as good: 1000 x 3072 x
8200 1.44 with 128 columns, 1.23 with 256, 1.14 and 1.05 with as many by pairs; 8184 x 8200 x 4088
1.38 with 256 columns, 1.08 by pairs; 1024 x 3080 x 4096 1.24 with 128 columns, 1.02 with 256."""
PAIR = 1.05
"""Time of a pair's tile over that of two blocks: they wait for each other."""
STORING_STEPS = {1: 3.5, 2: 4.4}
"""Steps along the contraction that take as long as to begin a tile and to store it, whatever its
loads, by the blocks of a tile. Of 3 steps pairs of 256 x 256 took 1.25 of the time of 128 x 192,
though they load least, and of one step 1.08."""
STEPS_IN_A_US, SENT_IN_A_US = 128 * 256 / 0.7, 245e3
"""Elements of results that a multiprocessor adds a step of `tile_k` to, and bytes that one device
sends beside a matmul, in a microsecond."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """A result that is made in tiles: `shards` of `rows` x `columns`, on so many multiprocessors.

    A tile has rows of one shard. `lhs_within`: the share of rows of lhs that are no multiples of
    128 bytes, so that most begin within a line of the L2, and `rhs_within`: that of rhs. `k`: the
    length of the contraction on a device; None for products whose tiles blocks do not share.
    `full_waves`: blocks may share tiles of a full wave, too.
    """

    shards: int
    rows: int
    columns: int
    multiprocessors: int
    lhs_within: float = 0.0
    rhs_within: float = 0.0
    k: int | None = None
    full_waves: bool = True

    @classmethod
    def of(cls, problem: Problem, columns: int, k: int, *, own: float = 1.0) -> Result:
        """Of a matmul whose rows have an owner each: `columns` and `k` are those of one device.

        `own`: the share of lhs that lies as the caller has it; the kernel puts others in lines.
        """
        return cls(
            shards=problem.devices,
            rows=ceil_div(problem.sizes["m"], problem.devices),
            columns=columns,
            multiprocessors=problem.machine.multiprocessors,
            lhs_within=own * _begins_within(k, problem),
            rhs_within=float(_begins_within(columns, problem)),
            k=k,
        )

    @property
    def in_lines(self) -> bool:
        """Whether rows of both operands are multiples of 128 bytes."""
        return not self.lhs_within and not self.rhs_within

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
        steps = ceil_div(self.k, tile.tile_k)
        sharing = remainder.sharing_of(tile, steps, full_waves=self.full_waves)
        return remainder.remainder_of(self.tiles(tile), self.multiprocessors, sharing)

    def _waves_of_time(self, tile: TileShape) -> float:
        """The waves, of which the last one is shorter if its tiles are shared."""
        waves, shared = self.waves(tile), self._remainder(tile)
        return waves if shared is None else waves - 1 + remainder.time(shared) / shared.steps

    def time(self, tile: TileShape) -> float:
        """Of the waves: elements of tiles that a multiprocessor makes, as if of 256 columns."""
        if self.in_lines:
            waves = self._waves_of_time(tile) * COSTS.get(tile.tile_n, 1.0)
        else:
            last, before = self._last_wave(tile), self.waves(tile) - 1
            waves = before * self._by_loads(tile) + self._by_loads(tile, last)
        paired = PAIR if tile.blocks > 1 else 1.0
        return waves * (tile.tile_m // tile.blocks) * tile.tile_n * paired

    def _last_wave(self, tile: TileShape) -> float:
        """The share of multiprocessors that have a tile of the last wave."""
        together = self.multiprocessors // tile.blocks
        return (self.tiles(tile) - (self.waves(tile) - 1) * together) / together

    def _by_loads(self, tile: TileShape, busy: float = 1.0) -> float:
        """Time of an element of the result, over that where loads do not limit it.

        `busy`: the share of multiprocessors that load; what the others leave, these have more of.
        """
        of_lhs = (1 + (LHS_WITHIN - 1) * self.lhs_within) / tile.tile_n
        of_rhs = (1 + (RHS_WITHIN - 1) * self.rhs_within) / tile.tile_m
        loads = LOAD * (of_lhs + of_rhs) * busy
        of_steps = (1 + loads**SHARPNESS) ** (1 / SHARPNESS)
        if self.k is not None:
            steps = ceil_div(self.k, tile.tile_k)
            besides = STORING_STEPS[tile.blocks]
            of_steps = (of_steps * steps + besides) / (steps + STORING_STEPS[1])
        return max(of_steps, COSTS.get(tile.tile_n, 1.0))

    def us(self, tile: TileShape, k: int) -> float:
        """Microseconds of the waves, where products are along `k`."""
        return self.time(tile) * ceil_div(k, tile.tile_k) / STEPS_IN_A_US

    def us_after(self, tile: TileShape, k: int, sent: int) -> float:
        """Microseconds for which results are on their way to peers after the last product.

        A wave's results leave together when it ends, under the next wave. Of an element of a result
        `sent` bytes leave the device.
        """
        blocks = self.multiprocessors // tile.blocks
        of_a_tile = tile.tile_m * tile.tile_n * sent / SENT_IN_A_US
        last = self.tiles(tile) % blocks or blocks
        before = of_a_tile * blocks if self.waves(tile) > 1 else 0.0
        waves = self._waves_of_time(tile)
        of_last = (waves - self.waves(tile) + 1) / waves * self.us(tile, k)
        return max(0.0, before - of_last) + of_a_tile * last


def _begins_within(columns: int, problem: Problem) -> bool:
    """Whether rows of so many columns are no multiples of 128 bytes."""
    return columns * problem.types.itemsize % SWIZZLE_BYTES > 0
