"""The warpgroup of a block that sends its tokens, in the kernel of `counted_dispatch`.

It stores each token of its chunk at the peers that have an expert of it, in `inbox`, where a
token has its place before any counts are known. So the links are busy while the tables are made.
Stores need no
requests in the other direction, as loads from a peer do, and so more of them cross.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed import kernel, schedule
from stretto.distributed.schedule import Int
from stretto.distributed.semaphores import Semaphore
from stretto.kernels.collectives.counted_layout import GROUP, Layout
from stretto.kernels.collectives.token_tables import everyones, load


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sender:
    """It, in the kernel.

    Attributes:
      x, inbox: refs `[tokens, parts, columns]`, and `[peers, tokens, parts, columns]`.
      sent: a semaphore for each peer and block.
      entries: what the block's chunks chose.
      told: the block's barrier behind which its counts are on their way.
      held, loaded: slots for tokens, and a barrier for each.
    """

    how: Layout
    x: Any
    inbox: Any
    sent: Semaphore
    entries: Any
    entries_arrived: Any
    told: Any
    held: Any
    loaded: Any

    def run(self) -> None:
        """Sends all tokens; on return they are in place and the peers know.

        What it tells last says that this block has read its peers' choices, too.
        """
        how = self.how
        total = how.first_token(kernel.block_id() + 1) - self._first_token()
        plgpu.barrier_wait(self.entries_arrived.at[0])
        lax.fori_loop(0, jnp.minimum(how.held, total), lambda i, _: self._fetch(i), None)
        # Counts that follow tokens over the links come late.
        plgpu.barrier_wait(self.told)
        lax.fori_loop(0, total, lambda i, _: self._step(i, total), None)
        plgpu.wait_smem_to_gmem(0, wait_read_only=False)
        for offset in how.team.peer_offsets:
            plgpu.barrier_wait(self.entries_arrived.at[offset])
        told = schedule.div(jnp.maximum(total - how.unfinished, 0), GROUP)
        lax.fori_loop(0, how.groups(total) - told, lambda i, _: self._tell(), None)

    def _first_token(self) -> Int:
        return self.how.first_token(kernel.block_id())

    def _slot(self, i: Int) -> Int:
        return schedule.rem(i, self.how.held)

    def _held(self, i: Int) -> Any:
        return self.held.at[self._slot(i), pl.ds(0, self.how.row.parts)]

    def _reaches(self, i: Int, offset: int) -> jax.Array:
        """Whether token `i` has an expert on a peer."""
        tables = self.how.tables
        own = tables.num_experts // self.how.team.size
        low, found = self.how.team.neighbour(offset) * own, jnp.bool_(False)
        for j in range(tables.top_k):
            entry = self.entries[0, i * tables.top_k + j]
            found |= (entry >= low) & (entry < low + own)
        return found

    def _is_sent(self, i: Int) -> jax.Array:
        first, *others = (self._reaches(i, offset) for offset in self.how.team.peer_offsets)
        for reaches in others:
            first |= reaches
        return first

    def _fetch(self, i: Int) -> None:
        """Starts to load a token that is sent."""

        @pl.when(self._is_sent(i))
        def _():
            source = self.x.at[self._first_token() + i]
            load(source, self._held(i), self.loaded.at[self._slot(i)], flat=True)

    def _step(self, i: Int, total: Int) -> None:
        """Starts to store token `i`, and loads another one into a slot that is free."""
        how, team = self.how, self.how.team
        pl.when(self._is_sent(i))(lambda: plgpu.barrier_wait(self.loaded.at[self._slot(i)]))
        for offset, ref in zip(team.peer_offsets, everyones(self.inbox, team)[1:], strict=True):

            @pl.when(self._reaches(i, offset))
            def _(offset=offset, ref=ref):
                to = ref.at[how.seen_from(offset), self._first_token() + i]
                plgpu.copy_smem_to_gmem(self._held(i), to, commit_group=False)

        plgpu.commit_smem_to_gmem_group()  # Of each token, also where it is not sent.

        # Only the newest tokens' stores are unfinished: the one before has arrived.
        @pl.when(i >= how.unfinished)
        def _():
            plgpu.wait_smem_to_gmem(how.unfinished, wait_read_only=False)
            following = i - how.unfinished + how.held
            pl.when(following < total)(lambda: self._fetch(following))
            done = i - how.unfinished + 1
            pl.when(schedule.rem(done, GROUP) == 0)(self._tell)

    def _tell(self) -> None:
        """Tells the peers that another group of tokens is in place."""
        team = self.how.team
        for offset in team.peer_offsets:
            sent = self.sent.at[self.how.seen_from(offset), kernel.block_id()]
            sent.signal(peer_id=team.neighbour(offset))
