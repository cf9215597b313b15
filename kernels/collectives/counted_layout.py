"""How a dispatch that makes the tables of many tokens is laid out: chunks, and a block's memory."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed.team import Team
from stretto.kernels.collectives.chunk_tables import LANES, Shape
from stretto.kernels.collectives.token_tables import Row
from stretto.kernels.problem.routing import NONE

COUNTS_BYTES = 32_768
"""Of a slot for counts of chunks."""
COUNTS_SLOTS = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """What is known before there is any memory.

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

    def in_chunks(self, expert_index: jax.Array) -> jax.Array:
        """`[tokens, top_k]` -> `[num_blocks, vectors, LANES]`."""
        missing = self.num_blocks * self.tables.tokens - self.tokens
        index = jnp.pad(expert_index, ((0, missing), (0, 0)), constant_values=NONE)
        index = index.reshape(self.num_blocks, self.tables.entries)
        missing = self.tables.vectors * LANES - self.tables.entries
        index = jnp.pad(index, ((0, 0), (0, missing)), constant_values=NONE)
        return index.reshape(self.num_blocks, self.tables.vectors, LANES)

    def of_chunks(self, positions: jax.Array) -> jax.Array:
        """`[num_blocks, vectors, LANES]` -> `[tokens, top_k]`."""
        flat = positions.reshape(self.num_blocks, -1)[:, : self.tables.entries]
        return flat.reshape(-1, self.tables.top_k)[: self.tokens]

    def scratch(self, dtype: Any) -> dict[str, Any]:
        """Shared memory and barriers, by name."""
        shape, experts = self.tables, (self.tables.expert_vectors, LANES)
        entries = (self.team.size, shape.vectors, LANES)
        together = shape.chunks_within(self.num_blocks, COUNTS_BYTES)
        slots = self.warpgroups * self.slots
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
            buffers=plgpu.SMEM((slots, self.row.padded, self.row.columns), dtype),
            arrived=plgpu.Barrier(num_barriers=slots),
        )
