"""How a matmul is cut up for Hopper: tiles, the ring in shared memory, and their constraints."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

from stretto.kernels.engine.shared_memory import ALIGNED_SCALES, SWIZZLE_BYTES
from stretto.kernels.problem.machine import HOPPER
from stretto.kernels.problem.scales import BLOCK, SCALE_BYTES, Granularity

PIECE_ROWS = 64  # of a piece that a multiplying warpgroup hands over
BLOCK_ROWS = 128, 192  # that one block makes of a tile


@dataclasses.dataclass(frozen=True, kw_only=True)
class TileConfig:
    """How a matmul is cut up.

    Attributes:
      tile_m, tile_n, tile_k: the tile, in elements. Its rows are split between the multiplying
        warpgroups: of one block, or of 256 and 384 rows of a pair, two neighbouring
        multiprocessors that load each tile of rhs once for both.
      num_stages: depth of the ring of lhs and rhs tiles.
      raster_width: tiles down a band of the raster (`orders.raster`).
      store_buffers: buffers of 64 rows x 128 bytes that each multiplying warpgroup hands its
        results over in; with enough for a whole tile, it waits for no store.
      most_parts: blocks that share a tile of the last wave at most, where that is faster
        (`remainder`); 1 for none.
    """

    architecture: ClassVar[str] = HOPPER

    tile_m: int = 128
    tile_n: int = 256
    tile_k: int = 64
    num_stages: int = 3
    raster_width: int = 16
    store_buffers: int = 4
    most_parts: int = 1

    @property
    def warpgroups(self) -> int:
        """Of a block, that multiply: two, or three for 192 rows, with fewer registers each then."""
        return 3 if self.rows == 192 else 2

    @property
    def blocks(self) -> int:
        """That make a tile together, an equal part of its rows each: one, or a pair."""
        return 1 if self.tile_m <= max(BLOCK_ROWS) else 2

    @property
    def rows(self) -> int:
        """Of a tile, that a block makes."""
        return self.tile_m // self.blocks

    @property
    def takes_edges(self) -> bool:
        """Matrices need not be made of whole 8 x 64 tiles."""
        return True

    def check(self) -> None:
        """Raises ValueError for a tile that the tensor cores or the copy engine cannot take."""
        if self.tile_m % self.blocks or self.rows not in BLOCK_ROWS:
            raise ValueError(
                f"tile_m={self.tile_m} must be 128 or 192, or twice that for a pair of blocks."
            )
        if self.tile_n % 64 or not 64 <= self.tile_n <= 256:
            raise ValueError(f"tile_n={self.tile_n} must be 64, 128, 192 or 256.")
        if self.tile_k not in (64, 128):
            raise ValueError(
                f"tile_k={self.tile_k} must be 64, or 128 of 8 bits: a row of the 128 byte swizzle."
            )
        for name, least in (
            ("num_stages", 2),
            ("raster_width", 1),
            ("store_buffers", 1),
            ("most_parts", 1),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}.")
        if self.blocks > 1 and self.most_parts > 1:
            raise ValueError(
                f"most_parts={self.most_parts} must be 1 with tile_m={self.tile_m}: pairs of blocks"
                " share no tiles of the last wave."
            )
        most = (128, 256) if self.warpgroups == 2 else (192, 128)
        if self.rows * self.tile_n > math.prod(most):
            raise ValueError(
                f"a tile of {self.rows} x {self.tile_n} needs more registers than"
                f" {self.warpgroups} warpgroups have; at most {most[0]} x {most[1]} a block."
            )

    def smem_bytes(self, itemsize: int, *, addends: bool = False) -> int:
        """Shared memory of a block's ring and epilogue's buffers, in bytes.

        With `addends` too: they come through the same buffers.
        """
        del addends
        ring = self.num_stages * (self.rows + self.tile_n) * self.tile_k * itemsize
        return ring + self.warpgroups * self.store_buffers * PIECE_ROWS * SWIZZLE_BYTES

    def scales_bytes(self, scales: Granularity | None) -> int:
        """Shared memory of scales of a granularity, in bytes."""
        if scales == "block":
            return self.num_stages * (self.rows + ALIGNED_SCALES) * SCALE_BYTES
        return (self.rows + self.tile_n) * SCALE_BYTES if scales == "row" else 0

    def check_blocks(self) -> None:
        """Raises ValueError for a tile that blocks with a scale each do not suit."""
        if BLOCK % self.tile_n:
            raise ValueError(
                f"tile_n={self.tile_n} must divide {BLOCK}, the columns that share a scale."
            )

    def check_mx(self) -> None:
        """Raises NotImplementedError: its tensor cores apply no scales."""
        raise NotImplementedError(
            "scales in float8_e8m0fnu are applied by tensor cores of Blackwell alone; on Hopper"
            f" pass scales in float32, of blocks of {BLOCK} or of rows and columns."
        )


LARGE = TileConfig(tile_n=256, num_stages=3, store_buffers=4)
SHARED = dataclasses.replace(LARGE, most_parts=8)
NARROW = TileConfig(tile_n=128, num_stages=5, store_buffers=2)
NARROWEST = TileConfig(tile_n=64, num_stages=7, store_buffers=1)
PAIR = TileConfig(tile_m=256, tile_n=128, num_stages=5, store_buffers=2)
LARGE_PAIR = TileConfig(tile_m=256, num_stages=3, store_buffers=4, raster_width=8)
WIDE_RESULT = TileConfig(tile_n=192, num_stages=4, store_buffers=3)
SHARED_WIDE = dataclasses.replace(WIDE_RESULT, most_parts=8)
LARGE_FP8 = TileConfig(tile_n=256, tile_k=128, num_stages=3, store_buffers=4)
SHARED_FP8 = dataclasses.replace(LARGE_FP8, most_parts=8)
NARROW_FP8 = TileConfig(tile_n=128, tile_k=128, num_stages=5, store_buffers=2)
NARROWEST_FP8 = TileConfig(tile_n=64, tile_k=128, num_stages=6, store_buffers=1)
WIDE_RESULT_FP8 = TileConfig(tile_n=192, tile_k=128, num_stages=4, store_buffers=3)
# Of 8 bits with a scale for each block: products of 64 rows are added to totals in registers.
# A tile of 256 x 128 spills registers there, and is slower.
BLOCKS = TileConfig(tile_n=128, tile_k=128, num_stages=5, store_buffers=2)
NARROW_BLOCKS = TileConfig(tile_n=64, tile_k=128, num_stages=6, store_buffers=1)
# Three warpgroups read each column of rhs from shared memory, so that a sixth less is loaded for a
# product, and two multiply while one adds: 1158 TFLOP/s where BLOCKS has 969 (docs/measure).
BLOCKS_BY_THREE = TileConfig(tile_m=192, tile_n=128, tile_k=128, num_stages=4, store_buffers=1)
