"""Weighted sums of the rows of tokens, made by one warpgroup of every block and stored at the owners.

A block walks through chunks of all devices' tokens. Of each it reads where the owner's entries are
(`positions`) and their weights, loads the rows of those that are here, adds them up in float32 in the
order of the token's choices, and stores the sum in the owner's `inbox`, in the slot of this device.
XLA adds the slots up afterwards, in the order of the devices: so the result has the same bits in
every run.

| object | written or signalled by | waited for by | count | proves |
|---|---|---|---|---|
| `inbox[d]` | device `d` | | | its sums |
| `tables.arrived[slot]` | the copy engine | the warpgroup | 2 | a chunk of positions and weights is there |
| `loaded[j][stage]` | the copy engine | the warpgroup | 1 | the row of choice `j` is there |
| stores of the sum before last | | the warpgroup | all | its slot may be written again |

A row is summed in pieces. All pieces of a token follow each other; or the tokens are walked through
in *rounds*, one for each piece, where the pieces become ready one after another.

Or the kernel adds up the slots, too (`token_totals`): then it is told of each chunk that is in place.
"""  # noqa: E501

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed import schedule
from stretto.distributed.schedule import Int
from stretto.kernels.collectives.summing import Summing
from stretto.kernels.collectives.token_tables import (
    Tables,
    everyones,
    load,
    of_device,
)
from stretto.kernels.problem.routing import NONE

FEW_ELEMENTS = 2**20
"""Of the sums of all devices: so few take less time than a kernel's launch."""
TOLD_AFTER = 3
"""Sums of the next chunk after which a chunk is told: its stores have ended by then."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sums:
    """The sums of one block, in a kernel.

    Attributes:
      how: they are made.
      rows: ref `[rows, parts, columns]`, of this device.
      tables: positions and weights.
      inboxes: refs `[devices, tokens, parts, columns]`, what `everyones` gives.
      me: this device.
      buffers, sums, loaded: of `Summing.scratch`.
      ready: called with (piece of a row) before the first row of a round is loaded; returns once
        that piece of all rows is there.
      told: called with (chunk) once all sums of a chunk are in place at the tokens' owner.
    """

    how: Summing
    rows: Any
    tables: Tables
    inboxes: Sequence[Any]
    me: Int
    sums: Any
    buffers: Any = None
    loaded: Sequence[Any] = ()
    ready: Callable[[Int], None] | None = None
    told: Callable[[Int], None] | None = None

    @classmethod
    def of(
        cls,
        how: Summing,
        *,
        rows: Any,
        positions: Any,
        weights: Any,
        inbox: Any,
        scratch: Mapping[str, Any],
        **others: Any,
    ) -> Self:
        """With refs of this device's arrays, and those of `Summing.scratch`."""
        team = how.chunks.team
        tables, me = (positions, weights), team.device_id()
        only_own = how.chunks.offsets == range(1)
        return cls(
            how=how,
            rows=rows,
            tables=Tables(
                chunks=how.chunks,
                top_k=how.top_k,
                sources=[[x] if only_own else everyones(x, team) for x in tables],
                slots=[scratch["token_table"], scratch["factors"]],
                arrived=scratch["token_table_arrived"],
                me=me,
            ),
            inboxes=[inbox] if only_own else everyones(inbox, team),
            me=me,
            sums=scratch["sums"],
            **cls.memory(how, scratch),
            **others,
        )

    @classmethod
    def memory(cls, how: Summing, scratch: Mapping[str, Any]) -> dict[str, Any]:
        """Where rows are loaded to, of the refs of `Summing.scratch`."""
        loaded = [scratch[f"loaded{j}"] for j in range(how.top_k)]
        return dict(buffers=scratch["buffers"], loaded=loaded)

    def run(self) -> None:
        """Makes all of them; on return the last ones may still be on their way, unless it tells."""
        how = self.how
        total = how.chunks.own * how.chunks.tokens * how.pieces

        def step(i: jax.Array, _: None) -> None:
            self._store(i, *self._sum(i))
            pl.when(i + how.stages < total)(lambda: self._fetch(i + how.stages))

        if how.piece.padded != how.piece.parts:
            self._clear()  # What pads a row stays zero.
        self.tables.fetch(jnp.int32(0))
        for i in range(how.stages):
            pl.when(i < total)(lambda i=i: self._fetch(jnp.int32(i)))
        lax.fori_loop(0, total, step, None)
        self._tell_last()

    def _tell_last(self) -> None:
        """Tells of the last chunk, if it tells of any."""
        if self.told is not None:
            plgpu.wait_smem_to_gmem(0, wait_read_only=False)
            own = self.how.chunks.own
            pl.when(own > 0)(lambda: self._tell(own - 1))

    def _tell(self, n: Int) -> None:
        if self.told is not None:
            self.told(n)

    def _tell_before(self, i: Int) -> None:
        """Tells of the chunk before that of sum `i`, whose stores have been committed."""
        each = self.how.chunks.tokens * self.how.pieces
        later = min(TOLD_AFTER, each) - 1
        n = schedule.div(i, each)

        @pl.when((n > 0) & (i - n * each == later))
        def _():
            plgpu.wait_smem_to_gmem(later + 1, wait_read_only=False)
            self._tell(n - 1)

    def _place(self, i: Int) -> tuple[Int, Int, Int]:
        """(chunk, the token in it, the piece of its row) of this block's sum `i`.

        In rounds the piece is the one within the round: there is one.
        """
        tokens, pieces = self.how.chunks.tokens, self.how.pieces
        n = schedule.div(i, tokens * pieces)
        rest = i - n * (tokens * pieces)
        token = schedule.div(rest, pieces)
        return n, token, rest - token * pieces

    def _window(self, n: Int, part: Int) -> Any:
        """The parts of a row that are summed."""
        if self.how.chunks.rounds > 1:
            part = self.how.chunks.round_of(n)
        return pl.ds(part * self.how.piece.parts, self.how.piece.parts)

    def _enter(self, i: Int) -> None:
        """Returns once the tables of a sum are there."""
        n, token, part = self._place(i)
        if self.ready is not None:
            self._enter_round(self.ready, n, token)
        pl.when((token == 0) & (part == 0))(lambda: self.tables.enter(n))

    def _fetch(self, i: Int) -> None:
        """Starts to load the rows of a sum."""
        n, token, part = self._place(i)
        stage, tables = self.how.chunks.slot(i, self.how.stages), self.tables
        self._enter(i)
        for j in range(self.how.top_k):
            here, number = tables.row(n, token, j)

            @pl.when(here)
            def _(j=j, number=number):
                load(
                    self.rows.at[number, self._window(n, part)],
                    self.buffers.at[stage, j, pl.ds(0, self.how.piece.parts)],
                    self.loaded[j].at[stage],
                    flat=self.how.chunks.flat,
                )

    def _enter_round(self, ready: Callable[[Int], None], n: Int, token: Int) -> None:
        number = self.how.chunks.round_of(n)
        first = n == number * self.how.chunks.own_of_a_round
        pl.when(first & (token == 0))(lambda: ready(number))

    def _sum(self, i: Int) -> tuple[jax.Array, Any]:
        """(a sum in float32, whether it has any row here)."""
        how, tables = self.how, self.tables
        n, token, _part = self._place(i)
        stage = how.chunks.slot(i, how.stages)
        sum_ = plgpu.layout_cast(jnp.zeros(how.shape, jnp.float32), how.layout)
        wanted = False
        for j in range(how.top_k):
            here, _row = tables.row(n, token, j)
            wanted = here | wanted

            def added(sum_: jax.Array, j: int = j) -> jax.Array:
                plgpu.barrier_wait(self.loaded[j].at[stage])
                weight = tables.number(1, n, token, j)
                return sum_ + weight * self.buffers[stage, j].astype(jnp.float32)

            sum_ = lax.cond(here, added, lambda sum_: sum_, sum_)
        return sum_, wanted

    def _store(self, i: Int, sum_: jax.Array, wanted: Any) -> None:
        """Starts to store a sum at the token's owner, if it is wanted."""
        how = self.how
        n, token, part = self._place(i)
        slot = how.chunks.slot(i, 2)

        # At most the sum before is still being stored: the one before that has left its slot.
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)

        @pl.when(wanted)
        def _():
            self.sums[slot] = sum_.astype(how.wire_dtype)
            plgpu.commit_smem()
            offset, first = how.chunks.place(n)
            window = self._window(n, part)
            of_device(
                list(self.inboxes),
                offset,
                lambda ref: plgpu.copy_smem_to_gmem(
                    self.sums.at[slot, pl.ds(0, how.piece.parts)],
                    ref.at[self.me, first + token, window],
                    commit_group=False,
                ),
            )

        plgpu.commit_smem_to_gmem_group()  # Of each sum, also where there is none.
        if self.told is not None:
            self._tell_before(i)

    def _clear(self) -> None:
        """Zeros in the buffers of this warpgroup."""
        self._clear_each(self.buffers)

    def _clear_each(self, buffers: Any) -> None:
        """The same in buffers `[stages, number, parts, columns]` of all warpgroups."""
        _, number, *shape = buffers.shape

        def clear(i: jax.Array, _: None) -> None:
            stage = self.how.chunks.slot(i, self.how.stages)
            for j in range(number):
                zeros = jnp.zeros(shape, buffers.dtype)
                buffers[stage, j] = plgpu.layout_cast(zeros, self.how.layout)

        lax.fori_loop(0, self.how.stages, clear, None)
        plgpu.commit_smem()


def added_up(inbox: jax.Array, positions: jax.Array, dtype: Any) -> jax.Array:
    """`[devices, tokens, d]` -> the sum over devices, in their order, `[tokens, d]`.

    Slots that nobody wrote may hold anything.
    """
    devices = inbox.shape[0]
    total = jnp.zeros(inbox.shape[1:], jnp.float32)
    for device in range(devices):
        here = (positions != NONE) & (positions % devices == device)
        has = _any_of_few(here) if inbox.size <= FEW_ELEMENTS else jnp.any(here, axis=1)
        total += jnp.where(has[:, None], inbox[device].astype(jnp.float32), 0)
    return total.astype(dtype)


def _any_of_few(here: jax.Array) -> jax.Array:
    """`jnp.any` along rows, which XLA computes for each element of the sum, without a kernel."""
    found = here[:, 0]
    for j in range(1, here.shape[1]):
        found |= here[:, j]
    return found
