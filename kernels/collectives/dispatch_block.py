"""A block of `expert_dispatch`'s kernel (`dispatch`), which walks through chunks of tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed import schedule
from stretto.distributed.schedule import Int
from stretto.kernels.collectives.token_tables import Chunks, Row, Tables, load, of_device

MOST_UNROLLED = 512
"""Choices of tokens whose first loads are unrolled; more take minutes to compile."""

type Place = tuple[jax.Array, Int]
"""Whether an entry of a table is on this device, and its row here."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
    """A block, in the kernel. Its tokens are numbered through its chunks.

    Attributes:
      row: a token's.
      stores: tokens whose stores may be unfinished when the next one's begin.
      tables: where the tokens of its chunks go.
      sources: the tokens of each device, as `everyones` gives them.
      rows: the result.
      buffers: shared memory for as many tokens as `arrived` has barriers.
      arrived: a barrier for each of them.
    """

    row: Row
    stores: int
    tables: Tables
    sources: list[Any]
    rows: Any
    buffers: Any
    arrived: Any

    def run(self) -> None:
        """Fetches and stores all of its tokens."""
        total = self._chunks.own * self._chunks.tokens
        self.tables.fetch(jnp.int32(0))
        if self._slots * self.tables.top_k <= MOST_UNROLLED:
            for i in range(self._slots):
                pl.when(i < total)(lambda i=i: self._fetch(jnp.int32(i)))
        else:
            first = jnp.minimum(self._slots, total)
            lax.fori_loop(0, first, lambda i, _: self._fetch(i), None)
        lax.fori_loop(0, total, lambda i, _: self._step(i, total), None)
        # Nothing else waits for the last stores where there are no peers to part from.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    @property
    def _chunks(self) -> Chunks:
        return self.tables.chunks

    @property
    def _slots(self) -> int:
        return self.buffers.shape[0]

    def _step(self, i: Int, total: Int) -> None:
        """Stores token `i`, and fetches into a slot that has become free."""
        self._send(i)

        # Only the newest tokens' stores are unfinished: the one before has left its slot.
        @pl.when(i >= self.stores)
        def _():
            plgpu.wait_smem_to_gmem(self.stores, wait_read_only=True)
            following = i - self.stores + self._slots
            pl.when(following < total)(lambda: self._fetch(following))

    def _entries(self, i: Int) -> tuple[Int, Int, Callable[[], list[Place]]]:
        """(chunk, the token in it, a function that reads its entries) of token `i`."""
        n = schedule.div(i, self._chunks.tokens)
        token = i - n * self._chunks.tokens
        choices = range(self.tables.top_k)
        return n, token, lambda: [self.tables.row(n, token, j) for j in choices]

    def _fetch(self, i: Int) -> None:
        """Starts to load token `i`, if an entry of it is here."""
        n, token, read = self._entries(i)
        pl.when(token == 0)(lambda: self.tables.enter(n))
        offset, first = self._chunks.place(n)
        slot = self._chunks.slot(i, self._slots)

        @pl.when(_any(read()))
        def _():
            of_device(
                self.sources,
                offset,
                lambda ref: load(
                    ref.at[first + token],
                    self._row_at(slot),
                    self.arrived.at[slot],
                    flat=self._chunks.flat,
                ),
            )

    def _send(self, i: Int) -> None:
        """Starts to store token `i` to its rows, once it is loaded."""
        _n, _token, read = self._entries(i)
        slot = self._chunks.slot(i, self._slots)
        found = read()
        pl.when(_any(found))(lambda: plgpu.barrier_wait(self.arrived.at[slot]))
        for here, place in found:

            @pl.when(here)
            def _(place=place):
                target = self.rows.at[place]
                plgpu.copy_smem_to_gmem(self._row_at(slot), target, commit_group=False)

        plgpu.commit_smem_to_gmem_group()  # Of each token, also where it stores nothing.

    def _row_at(self, slot: Int) -> Any:
        return self.buffers.at[slot, pl.ds(0, self.row.parts)]


def _any(found: list[Place]) -> jax.Array:
    wanted = found[0][0]
    for here, _ in found[1:]:
        wanted |= here
    return wanted
