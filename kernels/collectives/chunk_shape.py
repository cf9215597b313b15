"""The sizes of the chunks of tokens that blocks have, and of their tables."""

from __future__ import annotations

import dataclasses
import math

from stretto.distributed.primitives import warpgroup_tables
from stretto.distributed.schedule import ceil_div

LANES = 128
"""A warpgroup has as many threads."""
COPIED = 8
"""The copy engine takes multiples of 16 bytes: of so many counts of 16 bits."""
COUNTS_BYTES = 8192
"""Of a slot for counts of chunks."""
COUNTS_SLOTS = 3
"""Of a warpgroup."""
ALIGNED = 8
"""Entries of which chunks have a multiple: 32 bytes, where the copy engine asks for 16."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of the tables.

    Attributes:
      devices: of the team.
      tokens: of a chunk.
      vectors: that a chunk's entries fill.
      experts: a number for each, and what fills up the last vector.
    """

    devices: int
    tokens: int
    top_k: int
    num_experts: int
    vectors: int
    experts: int

    @classmethod
    def of(cls, devices: int, tokens: int, top_k: int, num_experts: int, blocks: int) -> Shape:
        """Of the largest chunk of a device's tokens in so many blocks."""
        together = _together(top_k)
        most = ceil_div(ceil_div(tokens, together), blocks) * together
        return cls(
            devices=devices,
            tokens=most,
            top_k=top_k,
            num_experts=num_experts,
            vectors=ceil_div(most * top_k, LANES),
            experts=ceil_div(num_experts, LANES) * LANES,
        )

    @property
    def together(self) -> int:
        """Tokens that no chunk parts: a multiple of `ALIGNED` entries."""
        return _together(self.top_k)

    @property
    def entries(self) -> int:
        """Of a chunk, without those that fill up vectors."""
        return self.tokens * self.top_k

    @property
    def kinds(self) -> int:
        """Experts and what is out of range, in whole vectors."""
        return warpgroup_tables.room_of(self.num_experts + 1)

    @property
    def counts(self) -> int:
        """Of a chunk: of each expert, then of entries that are out of range, then zeros."""
        return max(self.experts, ceil_div(self.num_experts + 1, COPIED) * COPIED)

    @property
    def smem_bytes(self) -> int:
        """Of all tables but the counts of all chunks and those of warpgroups."""
        of_entries = (2 * self.devices + 1) * self.vectors * LANES
        of_experts = (2 * self.devices + 2) * self.experts + self.devices
        return 4 * (of_entries + of_experts + self.devices * self.kinds) + 2 * self.kinds

    def piece(self, chunks: int) -> int:
        """Counts of as many of `chunks` as a slot holds; a divisor of all."""
        most = max(1, COUNTS_BYTES // (2 * self.counts))
        return self.counts * max(n for n in range(1, min(chunks, most) + 1) if chunks % n == 0)


def _together(top_k: int) -> int:
    return ALIGNED // math.gcd(ALIGNED, top_k)
