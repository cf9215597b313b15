"""How a matmul is cut up for Blackwell: tiles, the ring in shared memory, and their constraints."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from stretto.kernels.engine.shared_memory import ALIGNED_SCALES, SWIZZLE_BYTES
from stretto.kernels.problem.machine import BLACKWELL
from stretto.kernels.problem.scales import BLOCK, MX_BLOCK, Granularity

ACCUMULATORS = 2  # in tensor memory: one is drained while the next total is made
LANES = 128  # of tensor memory: the rows of an accumulator
COLUMNS = 512  # of tensor memory, in float32
ADDEND_BUFFERS = 2
SCALE_BYTES = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class TileConfig:
    """How a matmul is cut up.

    Attributes:
      blocks: 1, or 2: a pair of neighbouring multiprocessors makes a tile together. Each loads half
        of its operands, and the tensor cores of both read both halves: for the same product, two
        thirds of the bytes that one alone takes with 256 columns, and half with 128.
      tile_m, tile_n, tile_k: the tile, in elements; of its rows each block has 128.
      num_stages: depth of the ring of lhs and rhs tiles.
      raster_width: tiles down a band of the raster (`orders.raster`).
      store_buffers: buffers of 128 rows x 128 bytes that results are handed over in.
    """

    architecture: ClassVar[str] = BLACKWELL

    blocks: int = 1
    tile_m: int = LANES
    tile_n: int = 256
    tile_k: int = 64
    num_stages: int = 3
    raster_width: int = 16
    store_buffers: int = 2

    @property
    def most_parts(self) -> int:
        """Every tile is made by one block, or one pair of them."""
        return 1

    @property
    def takes_edges(self) -> bool:
        """Matrices must be made of whole 8 x 64 tiles."""
        return False

    def check(self) -> None:
        """Raises ValueError for a tile that the tensor cores or the copy engine cannot take."""
        if self.blocks not in (1, 2):
            raise ValueError(f"blocks={self.blocks} must be 1, or 2 for a pair.")
        if self.tile_m != self.blocks * LANES:
            raise ValueError(
                f"tile_m={self.tile_m} must be {self.blocks * LANES}: the {LANES} lanes of tensor"
                f" memory, in {self.blocks} block{'s' * (self.blocks > 1)}."
            )
        if self.tile_n % (64 * self.blocks) or not 64 <= self.tile_n <= COLUMNS // ACCUMULATORS:
            known = (
                "128 or 256: each block of a pair loads half"
                if self.blocks > 1
                else ("64, 128, 192 or 256")
            )
            raise ValueError(f"tile_n={self.tile_n} must be {known}.")
        if self.tile_k not in (64, 128):
            raise ValueError(
                f"tile_k={self.tile_k} must be 64, or 128 of 8 bits: a row of the 128 byte swizzle."
            )
        for name, least in (("num_stages", 2), ("raster_width", 1), ("store_buffers", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}.")

    def smem_bytes(self, itemsize: int, *, addends: bool = False) -> int:
        """Shared memory of a block's ring and epilogue's buffers, in bytes.

        With `addends`, those that they come through as well.
        """
        sides = (self.tile_m + self.tile_n) // self.blocks
        ring = self.num_stages * sides * self.tile_k * itemsize
        buffers = self.store_buffers + ADDEND_BUFFERS * addends
        return ring + buffers * LANES * SWIZZLE_BYTES

    def scales_bytes(self, scales: Granularity | None) -> int:
        """Shared memory of scales of a granularity, in bytes."""
        if scales == "block":
            return self.num_stages * (self.tile_m + ALIGNED_SCALES) * SCALE_BYTES
        if scales == "mx":
            return self.num_stages * 2 * LANES * BLOCK // MX_BLOCK
        tiles = ACCUMULATORS * (self.tile_m + self.tile_n) * SCALE_BYTES
        return tiles if scales == "row" else 0

    def check_blocks(self) -> None:
        """Raises ValueError for a tile that blocks with a scale each do not suit."""
        if BLOCK % self.tile_n:
            raise ValueError(
                f"tile_n={self.tile_n} must divide {BLOCK}, the columns that share a scale."
            )

    def check_mx(self) -> None:
        """Raises ValueError for a tile that has no room for scales in tensor memory."""
        if self.tile_n != LANES:
            raise ValueError(
                f"tile_n={self.tile_n} must be {LANES} for scales in float8_e8m0fnu, which lie"
                " beside the accumulators in tensor memory."
            )


LARGE = TileConfig(tile_n=256, num_stages=3)
PAIR = TileConfig(blocks=2, tile_m=2 * LANES, tile_n=256, num_stages=5)
NARROW = TileConfig(tile_n=128, num_stages=5)
NARROWEST = TileConfig(tile_n=64, num_stages=6)
ADDING = TileConfig(tile_n=128, num_stages=4)
PAIR_ADDING = dataclasses.replace(PAIR, num_stages=4)
LARGE_FP8 = TileConfig(tile_n=256, tile_k=128, num_stages=3)
PAIR_FP8 = dataclasses.replace(PAIR, tile_k=128)
NARROW_FP8 = dataclasses.replace(NARROW, tile_k=128)
NARROWEST_FP8 = dataclasses.replace(NARROWEST, tile_k=128)
ADDING_FP8 = dataclasses.replace(ADDING, tile_k=128)
PAIR_ADDING_FP8 = dataclasses.replace(PAIR_ADDING, tile_k=128)
# Of 8 bits with a scale for each block: totals of 128 columns are in registers. Of "mx": scales are
# in tensor memory.
BLOCKS = TileConfig(tile_n=128, tile_k=128, num_stages=5)
PAIR_BLOCKS = TileConfig(blocks=2, tile_m=2 * LANES, tile_n=128, tile_k=128, num_stages=6)
NARROW_BLOCKS = dataclasses.replace(BLOCKS, tile_n=64)
ADDING_BLOCKS = dataclasses.replace(BLOCKS, num_stages=4)
PAIR_ADDING_BLOCKS = dataclasses.replace(PAIR_BLOCKS, num_stages=5)
