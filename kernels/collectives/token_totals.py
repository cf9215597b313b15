"""The sums over devices of a block's own tokens, made as the sums of its peers arrive.

A warpgroup walks through chunks of the device's own tokens. It adds up the rows that are here, as
`token_sums` does, and to them the sums that the peers stored in `inbox`, in the order of the devices.
Its own sum is rounded as the peers' are. So the bits are those of `token_sums.added_up`.

| object | written or signalled by | waited for by | count | proves |
|---|---|---|---|---|
| `inbox[d]` | device `d`, another | | | its sums |
| `arrived[c]` | the summing warpgroups of the peers | the warpgroup that has chunk `c` | peers | all sums of the chunk's tokens are in `inbox` |
| `came[d][stage]` | the copy engine | the warpgroup | 1 | the sum of device `d` is in shared memory |

No summing warpgroup waits for one of these, so that these end, too.
"""  # noqa: E501

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed import schedule
from stretto.distributed.schedule import Int
from stretto.distributed.semaphores import Semaphore
from stretto.kernels.collectives.summing import Summing
from stretto.kernels.collectives.token_sums import Sums
from stretto.kernels.collectives.token_tables import Tables, load


def scratch(how: Summing) -> dict[str, Any]:
    """Shared memory and barriers, by name, for `kernel.launch`."""
    each, devices = how.chunks.warpgroups, how.chunks.team.size
    stages = each * how.stages
    found = dict(**how.scratch(), totals=plgpu.SMEM((each * 2, *how.shape), how.dtype))
    if how.direct:
        return found
    return dict(
        **found,
        came=plgpu.SMEM((stages, devices - 1, *how.shape), how.wire_dtype),
        **{f"came{d}": plgpu.Barrier(num_barriers=stages) for d in range(devices)},
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Totals(Sums):
    """The totals of one block's own tokens, in a kernel.

    Attributes:
      inbox, out: refs `[devices, tokens, parts, columns]` and `[tokens, parts, columns]`, here.
      arrived: a semaphore for each chunk.
      totals, came, came_loaded: of `scratch`.
    """

    inbox: Any
    out: Any
    arrived: Semaphore
    totals: Any
    came: Any
    came_loaded: Sequence[Any]

    @classmethod
    def made(
        cls,
        how: Summing,
        *,
        rows: Any,
        positions: Any,
        weights: Any,
        inbox: Any,
        out: Any,
        arrived: Semaphore,
        scratch: Mapping[str, Any],
    ) -> Totals:
        """With refs of this device's arrays, and those of `scratch`."""
        return cls(
            how=how,
            rows=rows,
            tables=Tables(
                chunks=how.chunks,
                sources=[[positions], [weights]],
                slots=[scratch["token_table"], scratch["factors"]],
                arrived=scratch["token_table_arrived"],
                me=how.chunks.team.device_id(),
            ),
            inboxes=[],
            me=how.chunks.team.device_id(),
            buffers=scratch.get("buffers"),
            sums=scratch["sums"],
            loaded=[] if how.direct else [scratch[f"loaded{j}"] for j in range(how.top_k)],
            inbox=inbox,
            out=out,
            arrived=arrived,
            totals=scratch["totals"],
            came=scratch.get("came"),
            came_loaded=[]
            if how.direct
            else [scratch[f"came{d}"] for d in range(how.chunks.team.size)],
        )

    def _clear(self) -> None:
        super()._clear()
        self._clear_each(self.came)

    def _enter(self, i: Int) -> None:
        """Returns once the tables of a total are there, and the peers' sums of its chunk."""
        super()._enter(i)
        n, token, part = self._place(i)
        chunks = self.how.chunks
        first = chunks.place(n)[1]

        @pl.when((token == 0) & (part == 0))
        def _():
            self.arrived.at[schedule.div(first, chunks.tokens)].wait(chunks.team.size - 1)

    def _fetch(self, i: Int) -> None:
        """Starts to load the rows of a total, and the peers' sums."""
        super()._fetch(i)
        n, token, part = self._place(i)
        chunks, stage = self.how.chunks, self.how.chunks.slot(i, self.how.stages)
        first = chunks.place(n)[1]
        for device in range(chunks.team.size):

            @pl.when((self.me != device) & self.tables.reaches(n, token, device))
            def _(device=device):
                load(
                    self.inbox.at[device, first + token, self._window(n, part)],
                    self._of_peer(stage, device).at[pl.ds(0, self.how.piece.parts)],
                    self.came_loaded[device].at[stage],
                    flat=chunks.flat,
                )

    def _of_peer(self, stage: Int, device: int) -> Any:
        """The slot of a peer's sum."""
        return self.came.at[stage, device - jnp.where(self.me < device, 1, 0)]

    def _add(self, i: Int) -> None:
        """Makes a total, and starts to store it."""
        how = self.how
        n, token, part = self._place(i)
        stage, slot = how.chunks.slot(i, how.stages), how.chunks.slot(i, 2)
        sum_, wanted = self._sum(i)
        own = sum_.astype(how.wire_dtype).astype(jnp.float32)
        total = plgpu.layout_cast(jnp.zeros(how.shape, jnp.float32), how.layout)
        for device in range(how.chunks.team.size):
            mine = self.me == device

            def of_peer(total: jax.Array, device: int = device) -> jax.Array:
                if how.direct:
                    first = how.chunks.place(n)[1]
                    window = self.inbox.at[device, first + token, self._window(n, part)]
                    return total + plgpu.load(window, layout=how.layout).astype(jnp.float32)
                plgpu.barrier_wait(self.came_loaded[device].at[stage])
                found = plgpu.load(self._of_peer(stage, device), layout=how.layout)
                return total + found.astype(jnp.float32)

            reached = self.tables.reaches(n, token, device)
            total = lax.cond(mine & wanted, lambda x, own: x + own, lambda x, own: x, total, own)
            total = lax.cond(~mine & reached, of_peer, lambda total: total, total)

        # At most the total before is still being stored: the one before that has left its slot.
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        first = how.chunks.place(n)[1]

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
