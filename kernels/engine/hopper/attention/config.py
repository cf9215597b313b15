"""How attention is cut up for Hopper: tiles of queries, blocks of keys, and their constraints."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from stretto.kernels.problem.machine import HOPPER

ROWS = 64
"""Queries of a warpgroup: what its tensor cores multiply at once."""
DIMS = (64, 128)
"""Sizes of heads that the main loop is built for."""
# Registers of a thread that (loads or stores, attends), by the warpgroups that attend. A block of
# three warpgroups starts with 168 a thread, one of four with 128, and has no more than these.
REGISTERS = {2: (56, 224), 3: (56, 152)}
TILE_K = {2: (64, 128), 3: (64,)}
"""Keys of a block, by the warpgroups: the registers of three do not hold scores of 128."""
LSE_BYTES = 4


class WholeTiles:
    """Tiles of attention and of its derivative, as the engine asks for them: blocks share none."""

    architecture: ClassVar[str] = HOPPER

    @property
    def tile_n(self) -> int:
        """The largest head size."""
        return max(DIMS)

    @property
    def blocks(self) -> int:
        """Every tile is made by one block."""
        return 1

    @property
    def takes_edges(self) -> bool:
        """Chunks are whole tiles of queries and blocks of keys."""
        return False

    @property
    def most_parts(self) -> int:
        """Blocks share no tile."""
        return 1

    @property
    def raster_width(self) -> int:
        """Tiles are in an order of attention's own (`AttentionOrder`, `BlockOrder`)."""
        return 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionTiles(WholeTiles):
    """How attention is cut up.

    Attributes:
      warpgroups: that attend, each with 64 queries of a tile: 2 or 3.
      tile_k: keys of a block.
      num_stages: blocks of keys and values that are loaded ahead.
    """

    warpgroups: int = 2
    tile_k: int = 128
    num_stages: int = 2

    @property
    def tile_m(self) -> int:
        """Queries of a tile."""
        return ROWS * self.warpgroups

    def check(self) -> None:
        """Raises ValueError for what registers or tensor cores cannot take."""
        if self.warpgroups not in REGISTERS:
            raise ValueError(f"warpgroups={self.warpgroups} must be 2 or 3.")
        if self.tile_k not in TILE_K[self.warpgroups]:
            allowed = " or ".join(map(str, TILE_K[self.warpgroups]))
            raise ValueError(
                f"tile_k={self.tile_k} must be {allowed} with warpgroups={self.warpgroups}."
            )
        if self.num_stages < 2:
            raise ValueError(f"num_stages={self.num_stages} must be at least 2.")

    def smem_bytes(self, dim: int, itemsize: int) -> int:
        """Shared memory of queries, keys, values and results of heads of this size, in bytes."""
        rows = 2 * self.tile_m + 2 * self.num_stages * self.tile_k
        return rows * dim * itemsize + self.tile_m * LSE_BYTES


LARGE = AttentionTiles()
DEEP = AttentionTiles(num_stages=4)
TALL = AttentionTiles(warpgroups=3, tile_k=64, num_stages=6)
"""Both for heads of size 64, of which there is room for more stages, or three warpgroups."""
