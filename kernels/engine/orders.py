"""Orders of the tiles of a matrix product: integer functions, for kernels and for tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from stretto.distributed.schedule import Int, ceil_div, div, rem, where
from stretto.kernels.engine.parts import Tile
from stretto.kernels.engine.tiles import TileShape


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
    """Tiles of shards of `m_shard` rows and `n` columns, shard after shard.

    Within a shard they follow a raster. The kernel defines the shard of a step.

    Attributes:
      m_shard, n: the size of a shard.
      shape: the tiles.
      steps: how many shards there are.
    """

    m_shard: int
    n: int
    shape: TileShape
    steps: int = 1

    @property
    def m_tiles(self) -> int:
        """Tiles along the rows of a shard."""
        return ceil_div(self.m_shard, self.shape.tile_m)

    @property
    def n_tiles(self) -> int:
        """Tiles along the columns."""
        return ceil_div(self.n, self.shape.tile_n)

    @property
    def tiles_per_shard(self) -> int:
        """Tiles of one shard."""
        return self.m_tiles * self.n_tiles

    @property
    def num_tiles(self) -> int:
        """Tiles of all shards."""
        return self.steps * self.tiles_per_shard

    def count(self) -> int:
        """Tiles of all shards."""
        return self.num_tiles

    def locate(self, index: Int) -> Tile:
        """The tile at `index`; its row and column are within the shard."""
        step = div(index, self.tiles_per_shard)
        within = index - step * self.tiles_per_shard
        return Tile(step, *raster(within, self.m_tiles, self.n_tiles, self.shape.raster_width))

    def index(self, m: Int, n: Int) -> Int:
        """A number for the tile at row `m` and column `n` of a shard's tiles."""
        return m * self.n_tiles + n


@dataclasses.dataclass(frozen=True)
class OwnersOrder:
    """Tiles of a matrix of which every device owns the rows of one shard, its own in between.

    A device computes tiles for its `size - 1` peers and for itself. The blocks compute `num_blocks`
    tiles at a time, a *wave*. For every tile of a shard the device computes the peers' tiles, and
    its own some waves later, when the peers' products for it have arrived. So the order has three
    sections:

    | section | tiles | which |
    |---|---|---|
    | lead | `(size - 1) * last_own` | for peers |
    | mixed | the rest | groups of `size`: one for each peer, and an own one |
    | last own | `last_own` | own |

    Within a full wave the tiles are rotated by one block a wave: if a block had
    an own tile in every wave, or in none, the blocks would have unequal work.

    Without a `lag` all own tiles are last, as in a `ShardOrder`.

    Attributes:
      shard: the tiles of one shard.
      size: the number of devices.
      num_blocks: blocks that share the tiles: block `b` takes those at `b`, `b + num_blocks`, ...
        Where several blocks make a tile together, these clusters are meant.
      lag: waves between an own tile and the peers' same tile in the mixed section, as far
        as a shard has the tiles for it; fewer at both ends. Or None.
    """

    shard: ShardOrder
    size: int
    num_blocks: int
    lag: int | None

    @property
    def peers(self) -> int:
        """The other devices."""
        return self.size - 1

    @property
    def num_tiles(self) -> int:
        """Tiles of all shards."""
        return self.size * self.shard.tiles_per_shard

    def count(self) -> int:
        """Tiles of all shards."""
        return self.num_tiles

    def locate(self, index: Int) -> Tile:
        """The tile at `index`; its row and column are within the shard.

        Steps are the peers, and `size - 1` is the device itself.
        """
        if self.lag is None:
            return self.shard.locate(index)
        last_own, mixed, lead = self._sections(self.lag)
        index = self._rotated(index)
        in_mixed = index - lead
        group = div(where(in_mixed < 0, 0, in_mixed), self.size)
        place = in_mixed - group * self.size
        is_mixed = (in_mixed >= 0) & (in_mixed < mixed)
        is_own = (in_mixed >= mixed) | (is_mixed & (place == self.peers))
        number = where(is_mixed, lead + group * self.peers + place, index)
        step, m, n, *_ = self.locate_for_peers(where(is_own, 0, number))
        own = where(is_mixed, group, self.shard.tiles_per_shard - last_own + in_mixed - mixed)
        own_m, own_n = self._raster(where(is_own, own, 0))
        return Tile(
            where(is_own, self.peers, step), where(is_own, own_m, m), where(is_own, own_n, n)
        )

    def locate_for_peers(self, number: Int) -> Tile:
        """The same for the peers' tiles alone, in the order of `locate` but for the rotation."""
        if self.lag is None:
            return self.shard.locate(number)
        tile = div(number, self.peers)
        return Tile(number - tile * self.peers, *self._raster(tile))

    def held_up(self, shared: int) -> int | None:
        """How many blocks of a device a block of each peer holds up that does not start.

        Without a lag the own tiles of a block wait for the tiles of one block of each peer, as does
        the only tile of a block; where the last `shared` ones are shared, a block makes parts of
        three at most. With a lag tiles are rotated, and sooner or later all blocks are held up:
        None.
        """
        if self.lag is not None and self.num_tiles > self.num_blocks:
            return None
        return self.peers * (3 if shared else 1)

    def _sections(self, lag: int) -> tuple[int, int, int]:
        """Tiles of each section: (last own, mixed, lead).

        In the mixed section an own tile follows `last_own` groups of `size` tiles after the peers'
        same tile: `lag` waves, rounded up so that every section holds whole groups.
        """
        wanted = ceil_div(lag * self.num_blocks, self.size**2)
        last_own = self.size * min(wanted, self.shard.tiles_per_shard // self.size)
        return last_own, self.size * (self.shard.tiles_per_shard - last_own), self.peers * last_own

    def _raster(self, index: Int) -> tuple[Int, Int]:
        """Narrower than a shard's own raster, because the tiles of one wave are in all shards."""
        width = max(1, self.shard.shape.raster_width // self.size)
        return raster(index, self.shard.m_tiles, self.shard.n_tiles, width)

    def _rotated(self, index: Int) -> Int:
        """`index`, but that another block begins in every full wave."""
        wave = div(index, self.num_blocks)
        first = wave * self.num_blocks
        rotated = first + rem(index - first + wave, self.num_blocks)
        return where(wave < self.num_tiles // self.num_blocks, rotated, index)


@dataclasses.dataclass(frozen=True)
class GroupsOrder:
    """Tiles of groups of equal size, group after group, and what memory has about each group.

    Attributes:
      groups: a group is a step.
      facts: group -> what memory has about it (`Tile.facts`).
    """

    groups: ShardOrder
    facts: Callable[[Int], tuple[Int, ...]]

    def count(self) -> int:
        """All tiles."""
        return self.groups.num_tiles

    def locate(self, index: Int) -> Tile:
        """The tile at `index`. Beyond the last one it is any."""
        group, m, n, *_ = self.groups.locate(index)
        # There it must be a group in memory all the same.
        group = jnp.minimum(group, self.groups.steps - 1)
        return Tile(group, m, n, self.facts(group))


@dataclasses.dataclass(frozen=True)
class RowTilesOrder:
    """Tiles of a matrix whose rows of tiles are counted at run time, in bands as in `raster`.

    Attributes:
      m_tiles: rows of tiles; an int32 that is known in the kernel only.
      most: what `m_tiles` is at most.
      n_tiles: columns of tiles.
      shape: the tiles.
      facts: row of tiles -> what memory has about it (`Tile.facts`).
    """

    m_tiles: jax.Array
    most: int
    n_tiles: Int
    shape: TileShape
    facts: Callable[[Int], tuple[Int, ...]] = lambda m: ()

    def count(self) -> jax.Array:
        """All tiles."""
        return self.m_tiles * self.n_tiles

    def locate(self, index: Int) -> Tile:
        """The tile at `index`; its step is 0. Beyond the last one it is any."""
        width = min(self.shape.raster_width, self.most)
        band = div(index, width * self.n_tiles)
        height = jnp.minimum(width, self.m_tiles - band * width)
        within = index - band * (width * self.n_tiles)
        n = lax.div(within, jnp.maximum(height, 1))
        m = within - n * height
        m = band * width + where(rem(n, 2) == 1, height - 1 - m, m)
        # Beyond the last tile, where it is not used, it must still be a place in memory.
        m = jnp.clip(m, 0, self.most - 1)
        return Tile(jnp.int32(0), m, n, self.facts(m))


@dataclasses.dataclass(frozen=True)
class BandsOrder:
    """The tiles of one band of columns of tiles after the other; the last band may be narrower.

    Attributes:
      rows: all tiles.
      band: columns of tiles of a band.
    """

    rows: RowTilesOrder
    band: int

    def count(self) -> jax.Array:
        """All tiles."""
        return self.rows.count()

    def locate(self, index: Int) -> Tile:
        """The tile at `index`. Beyond the last one it is any."""
        of_a_band = jnp.maximum(self.rows.m_tiles * self.band, 1)
        band = lax.div(jnp.int32(index), of_a_band)
        first = band * self.band
        width = jnp.clip(self.rows.n_tiles - first, 1, self.band)
        within = dataclasses.replace(self.rows, n_tiles=width).locate(index - band * of_a_band)
        return within._replace(n=first + within.n)
