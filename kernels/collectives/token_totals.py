"""The sums over devices of a block's own tokens, made as the sums of its peers arrive.

A warpgroup walks through chunks of the device's own tokens. It adds up the rows that are here, as
`fed_sums` does, and to them the sums that the peers stored in `inbox`, in the order of the devices.
Its own sum is rounded as the peers' are. So the bits are those of `token_sums.added_up`. Its warp
loads what the peers stored, too, once they have told of the chunk.

| object | written or signalled by | waited for by | count | proves |
|---|---|---|---|---|
| `inbox[d]` | device `d`, another | | | its sums |
| `arrived[c]` | the summing warpgroups of the peers | the warp that loads for chunk `c` | peers | all sums of the chunk's tokens are in `inbox` |
| `came_loaded[slot]` | the copy engine | the warpgroup | 1 | the sum of a peer is in shared memory |
| `came_freed[slot]` | the warpgroup | the warp | 1 | that sum has been added |

No warpgroup that makes sums for peers waits for one of these, so that these end, too.
"""  # noqa: E501

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed import schedule
from stretto.distributed.schedule import Int
from stretto.distributed.semaphores import Semaphore
from stretto.kernels.collectives.fed_sums import FedSums
from stretto.kernels.collectives.summing import Summing
from stretto.kernels.collectives.token_tables import load


def scratch(how: Summing) -> dict[str, Any]:
    """Shared memory and barriers, by name, for `kernel.launch`."""
    each = how.chunks.warpgroups
    slots = each * how.stages
    return dict(
        **how.scratch(),
        totals=plgpu.SMEM((each * 2, *how.shape), how.dtype),
        came=plgpu.SMEM((slots, *how.shape), how.wire_dtype),
        came_loaded=plgpu.Barrier(num_barriers=slots),
        came_freed=plgpu.Barrier(num_barriers=slots),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Totals(FedSums):
    """The totals of one warpgroup's own tokens: `run` makes them, and `feed`, in a warp, loads.

    Attributes:
      inbox, out: refs `[devices, tokens, parts, columns]` and `[tokens, parts, columns]`, here.
      arrived: a semaphore for each chunk.
      totals, came, came_loaded, came_freed: of `scratch`; `came` is a ring of `stages` sums.
    """

    out: Any
    arrived: Semaphore
    totals: Any
    came: Any
    came_loaded: Any
    came_freed: Any

    @classmethod
    def memory(cls, how: Summing, scratch: Mapping[str, Any]) -> dict[str, Any]:
        """Where rows and peers' sums are loaded to, of the refs of `scratch`."""
        names = ("totals", "came", "came_loaded", "came_freed")
        return super().memory(how, scratch) | {name: scratch[name] for name in names}

    def _start(self) -> tuple[jax.Array, ...]:
        return jnp.int32(0), jnp.int32(0)

    def _feed(self, i: jax.Array, used: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """Loads the rows of total `i`, and the peers' sums."""
        rows, came = used
        (rows,) = super()._feed(i, (rows,))
        how = self.how
        n, token, part = self._place(i)
        first = how.chunks.place(n)[1]

        @pl.when((token == 0) & (part == 0))
        def _():
            arrived = self.arrived.at[schedule.div(first, how.chunks.tokens)]
            arrived.wait(how.chunks.team.size - 1, decrement=True)

        for device in range(how.chunks.team.size):

            def filled(came: jax.Array, device: int = device) -> jax.Array:
                slot = how.chunks.slot(came, how.stages)
                plgpu.barrier_wait(self.came_freed.at[slot])
                load(
                    self.inboxes[0].at[device, first + token, self._window(n, part)],
                    self.came.at[slot, pl.ds(0, how.piece.parts)],
                    self.came_loaded.at[slot],
                    flat=how.chunks.flat,
                )
                return came + 1

            there = (self.me != device) & self.tables.reaches(n, token, device)
            came = lax.cond(there, filled, lambda came: came, came)
        return rows, came

    def _free_all(self) -> None:
        super()._free_all()
        self._free(self.came_freed, self.how.stages)

    def _clear(self) -> None:
        super()._clear()
        self._clear_slots(self.came, self.how.stages)

    def _step(self, i: jax.Array, used: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """Makes a total, and starts to store it."""
        how = self.how
        n, token, _part = self._place(i)
        rows, came = used
        self._enter_tables(i)
        sum_, wanted, rows = self._sum_of_ring(i, rows)
        own = sum_.astype(how.wire_dtype).astype(jnp.float32)
        total = plgpu.layout_cast(jnp.zeros(how.shape, jnp.float32), how.layout)
        for device in range(how.chunks.team.size):

            def of_peer(total: jax.Array, came: jax.Array) -> tuple[jax.Array, jax.Array]:
                slot = how.chunks.slot(came, how.stages)
                plgpu.barrier_wait(self.came_loaded.at[slot])
                found = plgpu.load(self.came.at[slot], layout=how.layout)
                plgpu.barrier_arrive(self.came_freed.at[slot])
                return total + found.astype(jnp.float32), came + 1

            mine = self.me == device
            there = ~mine & self.tables.reaches(n, token, device)
            total = lax.cond(mine & wanted, lambda x, own: x + own, lambda x, own: x, total, own)
            total, came = lax.cond(there, of_peer, lambda *same: same, total, came)
        self._leave_tables(i)
        self._store_total(i, total)
        return rows, came

    def _store_total(self, i: Int, total: jax.Array) -> None:
        how = self.how
        n, token, part = self._place(i)
        first, slot = how.chunks.place(n)[1], how.chunks.slot(i, 2)
        # At most the total before is still being stored: the one before that has left its slot.
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)

        @pl.when(first + token < self.out.shape[0])
        def _():
            self.totals[slot] = total.astype(how.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(
                self.totals.at[slot, pl.ds(0, how.piece.parts)],
                self.out.at[first + token, self._window(n, part)],
                commit_group=False,
            )

        plgpu.commit_smem_to_gmem_group()  # Of each total, also where there is no token.
