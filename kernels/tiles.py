"""Order of the tiles of a matrix product: plain integer arithmetic, the same in a kernel or out."""

from __future__ import annotations

import dataclasses

from stretto.distributed.schedule import Int, ceil_div, div, rem, where
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
    def m_groups(self) -> int:
        """Groups of tiles along the rows of a shard: a group is what a cluster of blocks does."""
        return ceil_div(self.m_shard, self.config.tile_m * self.config.cluster_size)

    @property
    def m_tiles(self) -> int:
        """Tiles along the rows of a shard; the last may hold no rows."""
        return self.m_groups * self.config.cluster_size

    @property
    def n_tiles(self) -> int:
        """Tiles along the columns."""
        return ceil_div(self.n, self.config.tile_n)

    @property
    def tiles_per_shard(self) -> int:
        """Tiles of one shard."""
        return self.m_tiles * self.n_tiles

    def locate(self, group: Int, rank: Int = 0) -> tuple[Int, Int, Int]:
        """(step, row of tiles within the shard, column of tiles) of a tile.

        Args:
          group: index of the group of tiles, in the order of work.
          rank: of the block within its cluster.
        """
        groups_per_shard = self.m_groups * self.n_tiles
        step = div(group, groups_per_shard)
        within = group - step * groups_per_shard
        m, n = raster(within, self.m_groups, self.n_tiles, self.config.raster_width)
        return step, m * self.config.cluster_size + rank, n

    def index(self, m: Int, n: Int) -> Int:
        """A number for the tile at row `m` and column `n` of a shard's tiles."""
        return m * self.n_tiles + n


@dataclasses.dataclass(frozen=True)
class ScatterOrder(ShardOrder):
    """Tiles in the order that suits a scatter: peers' tiles early, one's own as late as needed.

    The bands of rows of all shards are taken in `rounds`. A round does its band of every peer's
    shard, then the own band of the round before, whose parts the peers have sent meanwhile; the
    last own band comes at the end. So the links are busy from the first tile to nearly the last.
    Step `s < size - 1` is the shard of the `s + 1`-th successor, step `size - 1` the own one.
    """

    size: int
    max_rounds: int

    @property
    def rounds(self) -> int:
        """Number of rounds: the most up to `max_rounds` that divide a shard's rows of tiles."""
        return max(r for r in range(1, self.max_rounds + 1) if self.m_groups % r == 0)

    def locate(self, group: Int, rank: Int = 0) -> tuple[Int, Int, Int]:
        """(step, row of tiles within the shard, column of tiles) of a tile."""
        peers, height = self.size - 1, self.m_groups // self.rounds
        band = height * self.n_tiles
        later = group - peers * band
        is_first = later < 0
        index = where(is_first, 0, later)
        number = where(is_first, 0, 1 + div(index, self.size * band))
        position = where(is_first, group, rem(index, self.size * band))
        is_own = (position >= peers * band) | (number == self.rounds)
        in_band = where(number == self.rounds, position, position - peers * band)
        peer_step = div(position, band)
        within = where(is_own, in_band, position - peer_step * band)
        step = where(is_own, peers, peer_step)
        m, n = raster(within, height, self.n_tiles, self.config.raster_width)
        m = m + height * where(is_own, number - 1, number)
        return step, m * self.config.cluster_size + rank, n
