"""The configuration of a fused matmul that pulls its peers' operands."""

from __future__ import annotations

import dataclasses
import math

import jax

from stretto.kernels.engine import padding
from stretto.kernels.engine.architectures import TileConfig, check_tiles, scales_bytes
from stretto.kernels.engine.hopper import tile_config
from stretto.kernels.engine.shared_memory import SMEM_BYTES
from stretto.kernels.fused.obstacles import check_pull_slots
from stretto.kernels.problem.problem import Problem
from stretto.kernels.problem.scales import SCALE_BYTES, Granularity


def scale_piece(granularity: Granularity) -> tuple[int, int]:
    """Scales that are fetched at once, at most: along the contraction, and of rows.

    Arrays of scales are multiples of a piece, so that none reaches over an edge: of tiles of 192
    rows a piece may have 64.
    """
    return 8 if granularity == "block" else 1, 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class PullConfig:
    """The configuration of every all-gather matmul.

    Attributes:
      tiles: of the matmul.
      pull_rows, pull_columns: a piece that the pulling warp fetches at once, in elements.
      pull_slots: pieces on their way at once, per block.
    """

    tiles: TileConfig = tile_config.LARGE
    pull_rows: int = 16
    pull_columns: int = 256
    pull_slots: int = 2

    def check(self, problem: Problem) -> None:
        """Raises ValueError unless the kernel can be built so for `problem`."""
        check_tiles(self.tiles, problem)
        check_pull_slots(self.pull_slots)
        if self.pull_rows > 256 or self.pull_columns > 256:
            raise ValueError(
                f"a piece of {self.pull_rows} x {self.pull_columns} is too large: the copy engine"
                " takes at most 256 elements a side."
            )
        needed = self.smem_bytes(problem.types.itemsize) + scales_bytes(self.tiles, problem)
        if problem.types.scales in ("row", "block"):  # Those of "mx" are not pulled.
            needed += self.pull_slots * SCALE_BYTES * math.prod(scale_piece(problem.types.scales))
        if needed > SMEM_BYTES:
            raise ValueError(
                f"the kernel needs {needed} bytes of shared memory and a block has"
                f" {SMEM_BYTES}; take fewer stages or smaller pieces."
            )

    def smem_bytes(self, itemsize: int) -> int:
        """Shared memory of a block, in bytes."""
        pieces = self.pull_slots * self.pull_rows * self.pull_columns * itemsize
        return self.tiles.smem_bytes(itemsize) + pieces

    def padded(self, lhs: jax.Array, columns: int) -> jax.Array:
        """lhs, padded to whole pieces (`padding.pad`), for a result of `columns`."""
        if self.pull_rows == 1:  # One row alone has whole pieces.
            return padding.pad_to_tiles(lhs, padding.ROWS)
        return padding.pad(lhs, self.tiles, copied=columns >= padding.REUSE["lhs"])

    def piece_columns(self, columns: int, row_stride: int) -> int:
        """Columns of a piece of arrays of `columns`, to be stored to rows `row_stride` apart.

        A piece whose destination is contiguous must not reach past an edge: it would not be cut off
        there (`distributed.windows`).
        """
        if self.pull_rows == 1:
            return math.gcd(self.pull_columns, columns)
        return self.pull_columns // (2 if self.pull_columns == row_stride else 1)
