"""Order of the tiles of a matrix product: plain integer arithmetic, the same in a kernel or out."""

from __future__ import annotations

import dataclasses

from stretto.distributed.schedule import Int, ceil_div, div, where
from stretto.kernels.tile_config import TileConfig


def raster(index: Int, m_tiles: int, n_tiles: int, width: int) -> tuple[Int, Int]:
    """Position (m, n) of tile `index` in a raster that keeps recent operands in the L2 cache.

    The grid is cut into bands of `width` rows of tiles; a band is walked column by column, every
    other column upwards, so that neighbours in time share an operand. The last band may be
    narrower.
    """
    width = min(width, m_tiles)
    band = div(index, width * n_tiles)
    within = index - band * (width * n_tiles)
    full_bands, rest = divmod(m_tiles, width)
    if rest == 0:
        n = div(within, width)
        m = within - n * width
        height = width
    else:
        is_last = band == full_bands
        height = where(is_last, rest, width)
        n = where(is_last, div(within, rest), div(within, width))
        m = within - n * height
    odd = n - 2 * div(n, 2)
    m = where(odd == 1, height - 1 - m, m)
    return band * width + m, n


@dataclasses.dataclass(frozen=True)
class ShardOrder:
    """Tiles of a matrix of which every device owns `m_shard` rows: shard after shard.

    Within a shard they follow a raster. Which shard a step stands for is the kernel's affair.
    """

    m_shard: int
    n: int
    config: TileConfig

    @property
    def m_tiles(self) -> int:
        """Tiles along the rows of a shard."""
        return ceil_div(self.m_shard, self.config.tile_m)

    @property
    def n_tiles(self) -> int:
        """Tiles along the columns."""
        return ceil_div(self.n, self.config.tile_n)

    @property
    def tiles_per_shard(self) -> int:
        """Tiles of one shard."""
        return self.m_tiles * self.n_tiles

    def locate(self, index: Int) -> tuple[Int, Int, Int]:
        """(step, row of tiles within the shard, column of tiles) of the tile at `index`."""
        step = div(index, self.tiles_per_shard)
        within = index - step * self.tiles_per_shard
        return step, *raster(within, self.m_tiles, self.n_tiles, self.config.raster_width)

    def index(self, m: Int, n: Int) -> Int:
        """A number for the tile at row `m` and column `n` of a shard's tiles."""
        return m * self.n_tiles + n
