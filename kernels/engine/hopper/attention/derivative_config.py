"""How the derivative of attention is cut up for Hopper, and its constraints."""

from __future__ import annotations

import dataclasses

from stretto.kernels.engine.hopper.attention.config import DIMS, ROWS, WholeTiles

WARPGROUPS = 2
"""That derive, each with 64 keys of a block, and a quarter or half of what queries get."""
REGISTERS = (40, 232)
"""Of a thread that (loads or stores, derives): a block of three warpgroups starts with 168 each."""
STAGES = 2
"""Tiles of queries that are in memory at once; for more there is no room."""
SLOTS = 3
"""Of slopes: a warpgroup writes its own while the other one is a tile of queries behind."""
PIECE = 64
"""Rows and columns of what a warpgroup gives to the derivative of a tile of queries."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DerivativeTiles(WholeTiles):
    """How the derivative of attention is cut up.

    Attributes:
      ordered: blocks of keys add to the derivative of queries one after another, so that sums have
        the same bits in every run; otherwise as they come, which is faster.
      turns: warpgroups multiply in turns, so that one calculates weights meanwhile; otherwise the
        hardware decides.
      parts: of the heads of queries that share a head of keys, which blocks take apart; it divides
        their number. By default as many as share the work best; their sums are rounded each.
    """

    ordered: bool = False
    turns: bool = False
    parts: int | None = None

    @property
    def tile_k(self) -> int:
        """Keys of a block."""
        return WARPGROUPS * ROWS

    @property
    def tile_m(self) -> int:
        """Keys of a block: the rows of a tile of the result."""
        return self.tile_k

    def check(self) -> None:
        """Raises ValueError for a number of parts that no group of heads has."""
        if self.parts is not None and self.parts < 1:
            raise ValueError(f"parts={self.parts} must be at least 1.")


DEFAULT = DerivativeTiles()


def queries_of_tile(dim: int) -> int:
    """Queries of a tile: as many as registers take beside the sums for keys and values."""
    return 2 * PIECE if dim <= min(DIMS) else PIECE
