"""How a dispatch that makes the tables of many tokens is laid out: chunks, and a block's memory."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
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
      early: those that it asks for before all blocks have told their counts.
      stores: tokens of a warpgroup whose stores may be unfinished when the next one's begin.
      tables: the sizes of a chunk's tables.
    """

    team: Team
    row: Row
    tokens: int
    num_blocks: int
    warpgroups: int
    slots: int
    early: int
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

    def share(self, warpgroup: Int, tokens: Int) -> tuple[Int, Int]:
        """How many tokens of (this device, its peers) a warpgroup has, of `tokens` of each."""
        number = self.warpgroups
        own = schedule.share(tokens, warpgroup, number)
        return own, schedule.share(tokens * (self.team.size - 1), number - 1 - warpgroup, number)

    def order(self, i: Int, warpgroup: Int, tokens: Int) -> tuple[Int, Int]:
        """(whose, which of the chunk) a warpgroup's token `i` is; whose as a ring's offset.

        Until rows are known no token can be stored, and as many are on their way as there are
        slots: all peers', so that the links are busy in that time. Then come the own ones, evenly
        among the others.
        """
        if self.team.is_alone:
            return 0, i * self.warpgroups + warpgroup
        own, peers = self.share(warpgroup, tokens)
        first = jnp.minimum(self.slots, peers)
        # Divided once, before the loops that call this: own tokens among the others, in 2**-16.
        part = schedule.div(own << 16, jnp.maximum(own + peers - first, 1))
        own_before, own_then = (
            (jnp.maximum(n - first, 0) * part + (1 << 16) - 1) >> 16 for n in (i, i + 1)
        )
        number = (i - own_before) * self.warpgroups + self.warpgroups - 1 - warpgroup
        token = schedule.div(number, self.team.size - 1)
        offset = 1 + number - token * (self.team.size - 1)
        is_own = own_then > own_before
        own_token = own_before * self.warpgroups + warpgroup
        return lax.select(is_own, jnp.int32(0), offset), lax.select(is_own, own_token, token)

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
