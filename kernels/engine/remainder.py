"""The last, partial wave of tiles, shared by steps along the contraction.

Blocks make whole tiles as long as there is one for each of them. The tiles that are left over would
take as long as a full wave. So the steps of these `tiles` along k, tile after tile, are
divided into equal *ranges*, one a block:

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

NEAR = 4
"""Steps from a tile's edge within which a range begins at the edge: to give takes longer."""
GIVE, TAKE = 6.0, 2.5
"""What it costs to give a tile's sum, and to take one, in steps along the contraction."""
LEAST_GAIN = 0.07
"""Of a wave's time: with less to gain the last wave is not shared."""


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
      waves: full waves before it.
      tiles: that are left; fewer than `ranges`.
      steps: along the contraction of a tile.
      blocks: of the grid, or clusters of them.
      ranges: blocks that make the last wave.
    """

    waves: int
    tiles: int
    steps: int
    blocks: int
    ranges: int

    @property
    def first_tile(self) -> int:
        """The index of the first tile that is left."""
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


def remainder_of(tiles: int, steps: int, blocks: int, most: int) -> Remainder | None:
    """How the last wave of `tiles` is shared, at most `most` blocks a tile; None where it is not.

    `steps` are those along the contraction of each tile.
    """
    waves, left = divmod(tiles, blocks)
    if not waves or not left or most < 2 or left * steps * blocks >= 2**31:
        return None
    found = [
        Remainder(waves=waves, tiles=left, steps=steps, blocks=blocks, ranges=ranges)
        for ranges in _numbers_of_ranges(left, steps, blocks, most)
    ]
    if waves > 1 and steps > 2 * NEAR and (left + blocks) * steps * blocks < 2**31:
        more = dict(waves=waves - 1, tiles=left + blocks)
        found.append(Remainder(**more, steps=steps, blocks=blocks, ranges=blocks))
    best = min(found, key=time, default=None)
    return best if best is not None and time(best) < (1 - LEAST_GAIN) * steps else None


def _numbers_of_ranges(tiles: int, steps: int, blocks: int, most: int) -> list[int]:
    """Of ranges as long as a tile at most, and long enough to keep apart from its edges."""
    equal = [tiles * parts for parts in range(2, most + 1) if tiles * parts <= blocks]
    # All blocks: a tile is shared by one more than its length in ranges.
    uneven = [blocks] if ceil_div(blocks, tiles) < most else []
    least, longest = 2 * NEAR, steps - NEAR
    return [
        ranges
        for ranges in dict.fromkeys(equal + uneven)
        if ranges > tiles
        and least <= tiles * steps // ranges
        and ceil_div(tiles * steps, ranges) <= longest
    ]


def time(remainder: Remainder) -> float:
    """Of the last wave, in steps along the contraction."""
    longest = ceil_div(remainder.tiles * remainder.steps, remainder.ranges)
    if remainder.tiles > remainder.ranges:
        return longest - remainder.steps + GIVE + TAKE
    taken = ceil_div(remainder.ranges, remainder.tiles) - (
        1 if remainder.ranges % remainder.tiles == 0 else 0
    )
    return longest + GIVE + TAKE * taken
