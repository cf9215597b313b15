"""Sums of rows that a warp of their own loads, so that a warpgroup that adds has nothing to load.

Each warpgroup that adds has a ring of rows in shared memory, and a warp that fills it with the rows
that are here, one after the other, as far ahead of the sums as there are slots. What the warp spends
on a row, some hundred cycles, thus passes beside the sums. These, their order, and where they go are
those of `token_sums`.

| object | written or signalled by | waited for by | count | proves |
|---|---|---|---|---|
| `tables.arrived[slot]` | the copy engine | the warp, and its warpgroup | 2 | a chunk of positions and weights is there |
| `tables_freed[slot]` | the warpgroup | the warp | 1 | all sums of the chunk in the slot are made |
| `loaded[slot]` | the copy engine | the warpgroup | 1 | a row is there |
| `freed[slot]` | the warpgroup | the warp | 1 | the row in the slot has been added |
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

from stretto.distributed.schedule import Int
from stretto.kernels.collectives.summing import Summing
from stretto.kernels.collectives.token_sums import Sums
from stretto.kernels.collectives.token_tables import TABLE_SLOTS, load


@dataclasses.dataclass(frozen=True, kw_only=True)
class FedSums(Sums):
    """The sums of one warpgroup: `run` makes them, and `feed`, in a warp, loads their rows.

    Attributes:
      ring, row_loaded, row_freed, tables_freed: of `Summing.scratch`.
    """

    ring: Any
    row_loaded: Any
    row_freed: Any
    tables_freed: Any

    @classmethod
    def memory(cls, how: Summing, scratch: Mapping[str, Any]) -> dict[str, Any]:
        """Where rows are loaded to, of the refs of `Summing.scratch`."""
        del how
        names = ("ring", "row_loaded", "row_freed", "tables_freed")
        return {name: scratch[name] for name in names}

    def feed(self) -> None:
        """Loads the rows of all sums; the last ones may still be on their way on return."""
        total = self.how.chunks.own * self.how.chunks.tokens * self.how.pieces
        self._fetch_tables(jnp.int32(0))
        lax.fori_loop(0, total, self._feed, self._start())

    def run(self) -> None:
        """Makes all of them; on return the last ones may still be on their way, unless it tells."""
        how = self.how
        if how.piece.padded != how.piece.parts:
            self._clear()  # What pads a row stays zero.
        self._free_all()
        total = how.chunks.own * how.chunks.tokens * how.pieces
        lax.fori_loop(0, total, self._step, self._start())
        self._tell_last()

    def _start(self) -> tuple[jax.Array, ...]:
        """The rows that each ring has taken, or given, before the first sum."""
        return (jnp.int32(0),)

    def _feed(self, i: jax.Array, used: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """Loads the rows of sum `i`, before which the ring has taken `used`."""
        how, (rows,) = self.how, used
        n, token, part = self._place(i)

        @pl.when((token == 0) & (part == 0))
        def _():
            self.tables.wait(n)
            self._fetch_tables(n + 1)

        for j in range(how.top_k):
            here, number = self.tables.row(n, token, j)

            def filled(rows: jax.Array, number: Int = number) -> jax.Array:
                slot = how.chunks.slot(rows, how.ring)
                plgpu.barrier_wait(self.row_freed.at[slot])
                load(
                    self.rows.at[number, self._window(n, part)],
                    self.ring.at[slot, pl.ds(0, how.piece.parts)],
                    self.row_loaded.at[slot],
                    flat=how.chunks.flat,
                )
                return rows + 1

            rows = lax.cond(here, filled, lambda rows: rows, rows)
        return (rows,)

    def _fetch_tables(self, n: Int) -> None:
        """Starts to load chunk `n` of the tables, once the one that has its slot is done."""

        @pl.when(n < self.how.chunks.own)
        def _():
            plgpu.barrier_wait(self.tables_freed.at[self.how.chunks.slot(n, TABLE_SLOTS)])
            self.tables.fetch(n)

    def _free_all(self) -> None:
        """Frees all slots, for the first time."""
        self._free(self.row_freed, self.how.ring)
        self._free(self.tables_freed, TABLE_SLOTS)

    def _free(self, barriers: Any, slots: int) -> None:
        for slot in range(slots):
            plgpu.barrier_arrive(barriers.at[self.how.chunks.slot(slot, slots)])

    def _step(self, i: jax.Array, used: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """Makes sum `i`, before which the ring has given `used`, and starts to store it."""
        self._enter_tables(i)
        sum_, wanted, rows = self._sum_of_ring(i, *used)
        self._leave_tables(i)
        self._store(i, sum_, wanted)
        return (rows,)

    def _enter_tables(self, i: Int) -> None:
        n, token, part = self._place(i)
        pl.when((token == 0) & (part == 0))(lambda: self.tables.wait(n))

    def _leave_tables(self, i: Int) -> None:
        """Frees the tables of a chunk of which the last sum has been made."""
        chunks = self.how.chunks
        n, token, part = self._place(i)

        @pl.when((token == chunks.tokens - 1) & (part == self.how.pieces - 1))
        def _():
            plgpu.barrier_arrive(self.tables_freed.at[chunks.slot(n, TABLE_SLOTS)])

    def _sum_of_ring(self, i: Int, used: jax.Array) -> tuple[jax.Array, Any, jax.Array]:
        """(a sum in float32, whether it has any row here, the rows that the ring has given)."""
        how, tables = self.how, self.tables
        n, token, _part = self._place(i)
        rows = [tables.row(n, token, j)[0] for j in range(how.top_k)]
        weights = [tables.number(1, n, token, j) for j in range(how.top_k)]
        found = plgpu.layout_cast(jnp.zeros(how.shape, jnp.float32), how.layout), used
        wanted = False
        for here, weight in zip(rows, weights, strict=True):
            wanted = here | wanted

            def added(
                sum_: jax.Array, used: jax.Array, weight: jax.Array = weight
            ) -> tuple[jax.Array, jax.Array]:
                slot = how.chunks.slot(used, how.ring)
                plgpu.barrier_wait(self.row_loaded.at[slot])
                row = plgpu.load(self.ring.at[slot], layout=how.layout)
                plgpu.barrier_arrive(self.row_freed.at[slot])
                return sum_ + weight * row.astype(jnp.float32), used + 1

            found = lax.cond(here, added, lambda *found: found, *found)
        return found[0], wanted, found[1]

    def _clear(self) -> None:
        """Zeros in the ring of this warpgroup."""
        self._clear_slots(self.ring, self.how.ring)

    def _clear_slots(self, slots: Any, number: int) -> None:
        shape = slots.shape[1:]

        def clear(i: jax.Array, _: None) -> None:
            zeros = plgpu.layout_cast(jnp.zeros(shape, slots.dtype), self.how.layout)
            slots[self.how.chunks.slot(i, number)] = zeros

        lax.fori_loop(0, number, clear, None)
        plgpu.commit_smem()


def fed(how: Summing, warp: Int) -> Summing:
    """`how` as the warp sees it that loads for warpgroup `warp`, counted from the first one."""
    return dataclasses.replace(how, chunks=dataclasses.replace(how.chunks, warpgroup=warp))
