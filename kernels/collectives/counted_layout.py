"""How a dispatch that makes the tables of many tokens is laid out: chunks, and a block's memory."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed import schedule
from stretto.distributed.schedule import Int, ceil_div
from stretto.distributed.team import Team
from stretto.kernels.collectives.chunk_shape import LANES, Shape
from stretto.kernels.collectives.token_tables import Row
from stretto.kernels.problem.routing import NONE

COUNTS_BYTES = 32_768
"""Of a slot for counts of chunks."""
COUNTS_SLOTS = 2
GROUP = 4
"""Tokens of a chunk that a peer is told of at once."""
MOST_HELD = 8
"""Tokens of a block that are on their way to a peer at once."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """What is known before there is any memory.

    A device's entries lie as the caller has them. Blocks share them out in pieces of a few tokens,
    as evenly as these allow, in their order. All load as many entries as the largest chunk has:
    some of the next one, too, which nobody reads.

    Attributes:
      warpgroups: of a block, which share out its tokens.
      slots: tokens of a warpgroup on their way at once.
      stores: tokens of a warpgroup whose stores may be unfinished when the next one's begin.
      held: slots for tokens on their way to peers.
      tables: the sizes of a chunk's tables.
    """

    team: Team
    row: Row
    tokens: int
    num_blocks: int
    warpgroups: int
    slots: int
    stores: int
    held: int
    tables: Shape

    @classmethod
    def of(
        cls,
        team: Team,
        row: Row,
        tokens: int,
        num_blocks: int,
        tables: Shape,
        warpgroups: int,
        most: int,
        *,
        slots: int,
        stores: int,
    ) -> Layout:
        """With up to `slots` slots, of the `most` for which there is memory in all."""
        held = 0 if team.is_alone else max(2, min(MOST_HELD, most // 3))
        each = max(2, min(slots, most - held, team.size * tables.tokens) // warpgroups)
        return cls(
            team=team,
            row=row,
            tokens=tokens,
            num_blocks=num_blocks,
            warpgroups=warpgroups,
            slots=each,
            stores=min(stores, each - 1),
            held=held,
            tables=tables,
        )

    @property
    def _pieces(self) -> int:
        return ceil_div(self.tokens, self.tables.together)

    @property
    def entries(self) -> int:
        """Of a device, with those that fill up the last piece."""
        return self._pieces * self.tables.together * self.tables.top_k

    @property
    def unfinished(self) -> int:
        """Tokens whose stores at peers may be unfinished when the next one's begin."""
        return self.held // 2

    def groups(self, tokens: Int) -> Int:
        """Of a chunk: how often a peer is told of it, also where it has no token."""
        return schedule.div(jnp.maximum(tokens, 1) + (GROUP - 1), GROUP)

    def seen_from(self, offset: int) -> int:
        """This device's place among the peers of the one at `offset` on the ring."""
        return self.team.size - offset - 1

    @property
    def sizes(self) -> list[int]:
        """How many entries chunks have."""
        most = self.tables.entries
        if self._pieces % self.num_blocks == 0:
            return [most]
        return [most - self.tables.together * self.tables.top_k, most]

    def first_token(self, block: Int) -> Int:
        """Of a block's chunk."""
        first = schedule.div(block * self._pieces, self.num_blocks)
        return first * self.tables.together

    def flat(self, expert_index: jax.Array) -> jax.Array:
        """`[tokens, top_k]` -> `[entries]`."""
        index = expert_index.reshape(-1)
        missing = self.entries - index.size
        return jnp.pad(index, (0, missing), constant_values=NONE) if missing else index

    def scratch(self, dtype: Any) -> dict[str, Any]:
        """Shared memory and barriers, by name."""
        shape, experts = self.tables, (self.tables.expert_vectors, LANES)
        entries = (self.team.size, shape.vectors * LANES)
        together = shape.chunks_within(self.num_blocks, COUNTS_BYTES)
        slots, row = self.warpgroups * self.slots, (self.row.padded, self.row.columns)
        to_peers = dict(
            told=plgpu.Barrier(),
            held=plgpu.SMEM((self.held, *row), dtype),
            loaded=plgpu.Barrier(num_barriers=self.held),
        )
        return dict(
            entries=plgpu.SMEM(entries, jnp.int32),
            entries_arrived=plgpu.Barrier(num_barriers=self.team.size),
            places=plgpu.SMEM(entries, jnp.int32),
            own_positions=plgpu.SMEM(entries[1:], jnp.int32),
            own_counts=plgpu.SMEM(experts, jnp.int32),
            sums=plgpu.SMEM((2, *experts), jnp.int32),
            firsts=plgpu.SMEM((self.team.size, *experts), jnp.int32),
            counts_of=plgpu.SMEM((COUNTS_SLOTS, together, *experts), jnp.int32),
            counts_arrived=plgpu.Barrier(num_barriers=COUNTS_SLOTS),
            found=plgpu.Barrier(num_arrivals=self.warpgroups),
            buffers=plgpu.SMEM((slots, *row), dtype),
            arrived=plgpu.Barrier(num_barriers=slots),
            **({} if self.team.is_alone else to_peers),
        )
