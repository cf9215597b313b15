"""The parts of attention: those of a matmul (`engine.parts`), and what queries add to them.

The operands of the "contraction" are keys (`lhs`) and values (`rhs`). Its steps are segments
(`visible.VisibleKeys`): `k_tiles` counts these, an `Arrival` is waited for once a segment, and a
`Load` is called with the number of a block, `segment * blocks_of_chunk + block`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from stretto.distributed.schedule import Int
from stretto.kernels.engine.attention.documents import Documents
from stretto.kernels.engine.attention.visible import SeenByPlace, VisibleKeys
from stretto.kernels.engine.parts import Parts, Ref, Tile


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionParts(Parts):
    """A kernel of attention, as the sum of its parts; the sink's `store` is of `rows` at a time.

    Attributes:
      queries: (tile, first row, rows, stage, barrier): starts the copy of these rows of the tile.
      store_logsumexp: (tile, float32 `[rows]` in shared memory, first row): likewise to its result.
      visible: which keys each tile sees.
      exponent: of a score, to the base 2: its scale, times the logarithm of e; above 0.
      documents: of queries and keys; None if all are of one. They say what tiles see, too.
    """

    queries: Callable[[Tile, Int, int, Ref, Ref], None]
    store_logsumexp: Callable[[Tile, Ref, Int], None]
    visible: VisibleKeys
    exponent: float
    documents: Documents | None = None

    @property
    def seen(self) -> Documents | SeenByPlace:
        """Which blocks of keys a tile goes through."""
        return self.documents or SeenByPlace(self.visible)

    def first_query(self, tile: Tile) -> Int:
        """The place in the sequence of a tile's first query."""
        return self.visible.query_of(tile)
