"""How well tiles fill the multiprocessors: the waves of a product's tiles, and the time they take.

Every block makes one tile at a time; all of them together make a *wave*. The last wave is seldom
full, and takes as long as the others. Tiles of another width divide the result differently, and may
leave less of the last wave empty.
"""

from __future__ import annotations

import dataclasses

from stretto.distributed.schedule import ceil_div
from stretto.kernels.engine.tiles import TileShape

COSTS = {192: 0.99, 128: 1.01}
"""Time of an element of the result in tiles of so many columns, over that in tiles of 256, where
products are long. On two H200s own matmuls took 0.99 to 1.00 of it with 192, and 1.01 with 128."""
STEPS_IN_A_US, SENT_IN_A_US = 128 * 256 / 0.7, 245e3
"""Elements of results that a multiprocessor adds a step of `tile_k` to, and bytes that one device
sends beside a matmul, in a microsecond."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """A result that is made in tiles: `shards` of `rows` x `columns`, on so many multiprocessors.

    A tile has rows of one shard.
    """

    shards: int
    rows: int
    columns: int
    multiprocessors: int

    def waves(self, tile: TileShape) -> int:
        """Of all shards, in tiles of this shape."""
        of_a_shard = ceil_div(self.rows, tile.tile_m) * ceil_div(self.columns, tile.tile_n)
        return ceil_div(self.shards * of_a_shard, self.multiprocessors)

    def time(self, tile: TileShape) -> float:
        """Of the waves: elements of tiles that a multiprocessor makes, as if of 256 columns."""
        area = tile.tile_m * tile.tile_n
        return self.waves(tile) * area * COSTS.get(tile.tile_n, 1.0)

    def us(self, tile: TileShape, k: int) -> float:
        """Microseconds of the waves, where products are along `k`."""
        return self.time(tile) * ceil_div(k, tile.tile_k) / STEPS_IN_A_US
