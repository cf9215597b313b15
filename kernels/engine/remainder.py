"""The last, partial wave of tiles, shared by steps along the contraction.

Blocks make whole tiles as long as there is one for each of them. The tiles that are left over would
take as long as a full wave. So the steps of these `tiles` along the contraction, tile after tile,
are divided into equal *ranges*, one a block:

| range | steps of tile 0 | of tile 1 | of tile 2 |
|---|---|---|---|
| 0 | 0 to 53 | | |
| 1 | 54 to 79 | 0 to 27 | |
| 2 | | 28 to 79 | 0 to 1 |

Who has the first step of a tile owns it: it adds what the others made of the tile, in the order of
their ranges, and stores the sum. The others *give* their sums (`joining`). Within its range a block
first gives, of one tile at most, then makes whole tiles, and then begins one, so blocks never wait
for each other in a circle. Ranges that would begin within a few steps of a tile's edge begin there.

The tiles are those that are left over, or these and a full wave: then a range is longer than a
tile, and two blocks at most share one.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from stretto.distributed.schedule import Int, ceil_div, div, where
from stretto.kernels.engine.shared_memory import SWIZZLE_BYTES
from stretto.kernels.engine.tiles import TileShape

NEAR = 4
"""Steps from a tile's edge within which a range begins at the edge: to give takes longer."""
GIVE, TAKE = 6.0, 2.5
"""What it costs to give a tile's sum, and to take one, in steps along the contraction."""
LEAST_GAIN = 0.02
"""Of the time of all waves: with less to gain the last one is not shared. Where cards run at their
power limit, a wave that is not full also takes less power."""
HELD, BLOCKS = 32e6, 132
"""Bytes of rhs that the L2 holds while blocks take them one after another, and how many blocks. On
two H200s 28 MB cost nothing (5120 x 6912 x 5120), and more than it holds took 1.3 of the time."""


class Part(NamedTuple):
    """What a block makes of a tile.

    Attributes:
      first, steps: of the contraction, in tiles.
      gives: 1 if another block owns the tile, or else 0.
      given: where its sum goes, or the first of those that it takes.
      takes: sums of others that it adds, those from `given` on.
      number: of the tile, among those that are shared.
    """

    first: Int
    steps: Int
    gives: Int
    given: Int
    takes: Int
    number: Int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Remainder:
    """The division of the last wave.

    Attributes:
      waves: full waves of tiles that are not shared.
      tiles: those that are, after them.
      steps: along the contraction of a tile.
      blocks: of the grid, or clusters of them.
      ranges: blocks that make the shared tiles.
    """

    waves: int
    tiles: int
    steps: int
    blocks: int
    ranges: int

    @property
    def first_tile(self) -> int:
        """The index of the first of the tiles."""
        return self.waves * self.blocks

    def start(self, number: Int) -> Int:
        """The first step of a range, counted through all tiles; at `ranges`, the end."""
        start = div(number * (self.tiles * self.steps), self.ranges)
        tile = div(start, self.steps)
        within = start - tile * self.steps
        start = where(within < NEAR, start - within, start)
        return where(self.steps - within < NEAR, (tile + 1) * self.steps, start)

    def _starting_before(self, step: Int) -> Int:
        """How many ranges start before `step`, the end of a tile."""
        step = step - (NEAR - 1)  # Those nearer to it start there.
        steps = self.tiles * self.steps
        return div(step * self.ranges + steps - 1, steps)

    def share(self, block: Int) -> Int:
        """Parts of tiles of the last wave that a block makes."""
        first, last = self.start(block), self.start(block + 1) - 1
        return where(block < self.ranges, div(last, self.steps) - div(first, self.steps) + 1, 0)

    def part(self, block: Int, index: Int) -> Part:
        """The block's part at `index` in its share; with a negative one a whole tile.

        Of the latter only `first`, `steps`, `gives` and `takes` are meant.
        """
        whole = index < 0
        number = where(block < self.ranges, block, 0)
        start, end = self.start(number), self.start(number + 1)
        tile = div(start, self.steps) + where(whole, 0, index)
        begin = tile * self.steps
        first = where(start > begin, start - begin, 0)
        last = where(end - begin < self.steps, end - begin, self.steps)
        gives = where(first > 0, 1, 0)
        takes = self._starting_before(begin + self.steps) - number - 1
        return Part(
            first=where(whole, 0, first),
            steps=where(whole, self.steps, last - first),
            gives=where(whole, 0, gives),
            given=where(first > 0, number, number + 1),
            takes=where(whole | (first > 0), 0, takes),
            number=tile,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sharing:
    """Whether blocks may share the tiles of a product.

    Attributes:
      steps: along the contraction of every tile.
      most_parts: blocks that share a tile at most.
      skew: steps by which neighbouring blocks may be apart (`skew_of`).
      full_waves: tiles of a full wave may be shared, too: blocks make them in the order of their
        indices.
    """

    steps: int
    most_parts: int
    skew: int = 0
    full_waves: bool = True


def sharing_of(shape: TileShape, steps: int, *, full_waves: bool = True) -> Sharing:
    """That of a product in tiles of this shape, with so many steps along the contraction."""
    return Sharing(
        steps=steps, most_parts=shape.most_parts, skew=skew_of(shape), full_waves=full_waves
    )


def skew_of(shape: TileShape) -> int:
    """Steps by which blocks with neighbouring tiles may be apart, for tiles of this shape.

    Tiles below each other take the same columns of rhs. The L2 must hold these from when the first
    of them takes them until the last one does.
    """
    return int(HELD / (BLOCKS * shape.tile_n * SWIZZLE_BYTES))


def remainder_of(tiles: int, blocks: int, sharing: Sharing) -> Remainder | None:
    """How the last wave of `tiles` is shared; None where it is not."""
    waves, left = divmod(tiles, blocks)
    steps = sharing.steps
    if not waves or not left or sharing.most_parts < 2 or 2 * blocks**2 * steps >= 2**31:
        return None
    found = [
        Remainder(waves=waves, tiles=left, steps=steps, blocks=blocks, ranges=left * parts)
        for parts in range(2, sharing.most_parts + 1)
        if left * parts <= blocks and steps // parts >= 2 * NEAR
    ]
    if (
        sharing.full_waves
        and waves > 1
        and steps > 2 * NEAR
        and left * steps <= sharing.skew * blocks
    ):
        more = dict(waves=waves - 1, tiles=left + blocks, ranges=blocks)
        found.append(Remainder(**more, steps=steps, blocks=blocks))
    best = min(found, key=time, default=None)
    if best is None or steps - time(best) < LEAST_GAIN * (waves + 1) * steps:
        return None
    return best


def time(remainder: Remainder) -> float:
    """Of the last wave, in steps along the contraction."""
    tiles, ranges, steps = remainder.tiles, remainder.ranges, remainder.steps
    if tiles > ranges:
        return ceil_div(tiles * steps, ranges) - steps + GIVE + TAKE
    parts = ranges // tiles
    return ceil_div(steps, parts) + GIVE + TAKE * (parts - 1)
