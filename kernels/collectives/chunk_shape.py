"""The sizes of the chunks of tokens that blocks have, and of their tables."""

from __future__ import annotations

import dataclasses
import math

from stretto.distributed.schedule import ceil_div

LANES = 128
"""A warpgroup has as many threads."""
UNROLLED = 8
"""Entries that a loop takes at once, and of which chunks have a multiple."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of the tables.

    Attributes:
      devices: of the team.
      tokens: of a chunk.
      vectors: that a chunk's entries fill.
      expert_vectors: that a number for each expert fills.
    """

    devices: int
    tokens: int
    top_k: int
    num_experts: int
    vectors: int
    expert_vectors: int

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
            expert_vectors=ceil_div(num_experts, LANES),
        )

    @property
    def together(self) -> int:
        """Tokens that no chunk parts: `UNROLLED` entries or more, which the copy engine takes."""
        return _together(self.top_k)

    @property
    def entries(self) -> int:
        """Of a chunk, without those that fill up vectors."""
        return self.tokens * self.top_k

    @property
    def smem_bytes(self) -> int:
        """Of all tables but the counts of all chunks."""
        of_entries = (2 * self.devices + 1) * self.vectors
        return 4 * LANES * (of_entries + (self.devices + 3) * self.expert_vectors)

    def chunks_within(self, chunks: int, room: int) -> int:
        """Of `chunks` those whose counts fit into `room` bytes at once; a divisor of them."""
        most = max(1, room // (4 * LANES * self.expert_vectors))
        return max(n for n in range(1, min(chunks, most) + 1) if chunks % n == 0)


def _together(top_k: int) -> int:
    return UNROLLED // math.gcd(UNROLLED, top_k)
