"""How a dispatch that makes the tables of many tokens is laid out: chunks, and a block's memory."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed import schedule
from stretto.distributed.primitives import warpgroup_tables
from stretto.distributed.schedule import Int, ceil_div
from stretto.distributed.team import Team
from stretto.kernels.collectives.chunk_shape import COUNTS_SLOTS, LANES, Shape
from stretto.kernels.collectives.token_tables import Row
from stretto.kernels.problem.routing import NONE


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
      tables: the sizes of a chunk's tables.
    """

    team: Team
    row: Row
    tokens: int
    num_blocks: int
    warpgroups: int
    slots: int
    stores: int
    tables: Shape

    @property
    def _pieces(self) -> int:
        return ceil_div(self.tokens, self.tables.together)

    @property
    def entries(self) -> int:
        """Of a device, with those that fill up the last piece."""
        return self._pieces * self.tables.together * self.tables.top_k

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
        shape = self.tables
        entries, experts = (self.team.size, shape.vectors * LANES), (self.team.size, shape.experts)
        slots, counts_slots = self.warpgroups * self.slots, self.warpgroups * COUNTS_SLOTS
        return dict(
            entries=plgpu.SMEM(entries, jnp.int32),
            entries_arrived=plgpu.Barrier(num_barriers=self.team.size),
            places=plgpu.SMEM((entries[0], entries[1] + shape.kinds), jnp.int32),
            own_positions=plgpu.SMEM(entries[1:], jnp.int32),
            own_counts=plgpu.SMEM((shape.kinds,), jnp.int16),
            scratch=plgpu.SMEM((self.warpgroups, warpgroup_tables.WORDS * shape.kinds), jnp.int32),
            sums=plgpu.SMEM(experts, jnp.int32),
            firsts=plgpu.SMEM(experts, jnp.int32),
            strays=plgpu.SMEM(experts[:1], jnp.int32),
            scan=plgpu.SMEM((2 * shape.experts,), jnp.int32),
            counts_of=plgpu.SMEM((counts_slots, shape.piece(self.num_blocks)), jnp.int16),
            counts_arrived=plgpu.Barrier(num_barriers=counts_slots),
            found=plgpu.Barrier(num_arrivals=self.warpgroups),
            buffers=plgpu.SMEM((slots, self.row.padded, self.row.columns), dtype),
            arrived=plgpu.Barrier(num_barriers=slots),
        )
