"""What a warpgroup does in the kernel of `counted_dispatch`, where its protocol stands."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed import kernel, schedule
from stretto.distributed.schedule import Int
from stretto.distributed.semaphores import Semaphore
from stretto.kernels.collectives.chunk_tables import Tables
from stretto.kernels.collectives.counted_layout import Layout
from stretto.kernels.collectives.table_results import TableResults
from stretto.kernels.collectives.token_tables import everyones, load, of_device
from stretto.kernels.problem.routing import NONE


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
    """One warpgroup of a block, in the kernel.

    Attributes:
      warpgroup: its number.
      me: this device.
    """

    how: Layout
    warpgroup: Int
    me: Int
    x: Any
    index: Any
    rows: Any
    results: TableResults
    counts: Any
    counted: Semaphore
    seen: Semaphore
    entries: Any
    entries_arrived: Any
    places: Any
    own_positions: Any
    scratch: Any
    own_counts: Any
    sums: Any
    firsts: Any
    strays: Any
    scan: Any
    found: Any
    counts_of: Any
    counts_arrived: Any
    buffers: Any
    arrived: Any

    def run(self) -> None:
        """Makes the tables of the block's chunks, and moves the tokens of this device's experts."""
        how, tables, is_first = self.how, self._tables(), self.warpgroup == 0
        pl.when(is_first)(lambda: self._load_entries(tables))
        rank = functools.partial(self._rank, tables)
        plgpu.barrier_wait(self.entries_arrived.at[0])

        @pl.when(is_first)
        def _():
            rank(0)
            tables.store_counts()
            self._publish_counts()
            self._tell()

        for offset in range(1, how.team.size):
            plgpu.barrier_wait(self.entries_arrived.at[offset])
        self._each(rank, jnp.where(is_first, 1, 0))  # The first one has ranked the own chunk.
        # Before any token is asked for: signals that follow loads over the links come late.
        self.counted.wait(how.num_blocks * how.team.size)
        sources = everyones(self.x, how.team)
        total = schedule.share(self._tokens() * how.team.size, self.warpgroup, how.warpgroups)
        at_once = jnp.minimum(how.slots, total)
        lax.fori_loop(0, at_once, lambda i, _: self._fetch(sources, i), None)
        tables.sum_counts(self.counts, kernel.block_id(), self.warpgroup, how.warpgroups)
        self._meet()
        pl.when(is_first)(tables.find_first_rows)

        @pl.when(self.warpgroup == how.warpgroups - 1)
        def _():
            self.seen.signal()
            self._store_counts()

        self._meet()
        self._each(lambda offset: self._place_entries(tables, offset))
        self._meet()
        pl.when(is_first)(self._store_positions)
        lax.fori_loop(0, total, lambda i, _: self._step(sources, i, total), None)
        pl.when(is_first & (kernel.block_id() == 0))(self._zero_counted)
        # Nothing else waits for the last stores where there are no peers to part from.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def _load_entries(self, tables: Tables) -> None:
        """Starts to load the entries of all devices' chunks, the own ones first."""
        tables.clear_ends()
        most, first = self.how.tables.entries, self._first_token() * self.how.tables.top_k
        for offset, ref in enumerate(everyones(self.index, self.how.team)):
            target = self.entries.at[offset, pl.ds(0, most)]
            load(ref.at[pl.ds(first, most)], target, self.entries_arrived.at[offset], flat=True)

    def _rank(self, tables: Tables, offset: Int) -> None:
        tables.rank(offset, self.scratch.at[self.warpgroup])

    def _place_entries(self, tables: Tables, offset: Int) -> None:
        device = schedule.rem(self.me + offset, self.how.team.size)
        scratch = self.scratch.at[self.warpgroup]
        tables.place(offset, device, self.results.first_expert, scratch)

    def _each(self, fun: Callable[[Int], None], first: Int = 0) -> None:
        """Of the devices' chunks those that are this warpgroup's share, from its `first` one on."""
        number = self.how.warpgroups
        share = schedule.share(self.how.team.size, self.warpgroup, number)
        lax.fori_loop(first, share, lambda i, _: fun(self.warpgroup + i * number), None)

    def _meet(self) -> None:
        """Returns once all warpgroups of the block are here."""
        plgpu.barrier_arrive(self.found)
        plgpu.barrier_wait(self.found)

    def _tables(self) -> Tables:
        return Tables(
            shape=self.how.tables,
            team=self.how.team,
            tokens=self._tokens(),
            entries=self.entries,
            places=self.places,
            own_positions=self.own_positions,
            own_counts=self.own_counts,
            sums=self.sums,
            firsts=self.firsts,
            strays=self.strays,
            scan=self.scan,
            counts_of=self.counts_of,
            counts_arrived=self.counts_arrived,
        )

    def _tokens(self) -> Int:
        """Of each device, in this block's chunk."""
        return self.how.first_token(kernel.block_id() + 1) - self._first_token()

    def _first_token(self) -> Int:
        return self.how.first_token(kernel.block_id())

    def _publish_counts(self) -> None:
        """Starts to store the own counts on every device."""
        team, number = self.how.team, self.how.tables.counts
        for ref in everyones(self.counts, team):
            window = ref.at[self.me, pl.ds(kernel.block_id() * number, number)]
            source = self.own_counts.at[pl.ds(0, number)]
            plgpu.copy_smem_to_gmem(source, window, commit_group=False)
        plgpu.commit_smem_to_gmem_group()

    def _tell(self) -> None:
        """Publishes to every device that the own counts are in place."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=False)
        for offset in self.how.team.peer_offsets:
            self.counted.signal(peer_id=self.how.team.neighbour(offset))
        self.counted.signal()

    def _zero_counted(self) -> None:
        """Leaves it as it was, once no block waits for it."""
        self.seen.wait(self.how.num_blocks, decrement=True)
        self.counted.zero()

    def _store_counts(self) -> None:
        """Stores how many entries some experts have, and how many are out of range."""
        how, experts = self.how, self.how.tables.num_experts

        def total(of_device: Callable[[int], jax.Array]) -> jax.Array:
            return functools.reduce(jnp.add, map(of_device, range(how.team.size)))

        def store(i: Any, _: None) -> None:
            expert = kernel.block_id() + i * how.num_blocks
            self.results.store_count(expert, total(lambda device: self.sums[device, expert]))

        lax.fori_loop(0, schedule.share(experts, kernel.block_id(), how.num_blocks), store, None)

        @pl.when(kernel.block_id() == how.num_blocks - 1)  # It has no more experts than others.
        def _():
            self.results.store_count(jnp.int32(experts), total(lambda device: self.strays[device]))

    def _store_positions(self) -> None:
        """Starts to store the positions of the own chunk."""
        how, top_k = self.how, self.how.tables.top_k
        for size in filter(None, how.sizes):

            @pl.when(self._tokens() * top_k == size)
            def _(size=size):
                plgpu.copy_smem_to_gmem(
                    self.own_positions.at[pl.ds(0, size)],
                    self.results.positions.at[pl.ds(self._first_token() * top_k, size)],
                    commit_group=False,
                )

        plgpu.commit_smem_to_gmem_group()

    def _place(self, i: Int) -> tuple[Int, Int]:
        """(whose, which of the chunk) the warpgroup's token `i` is; whose as a ring's offset.

        Each warpgroup has tokens of all devices.
        """
        size = self.how.team.size
        number = i * self.how.warpgroups + self.warpgroup
        token = schedule.div(number, size)
        return schedule.rem(number - token * size + token, size), token

    def _slot(self, i: Int) -> Int:
        return self.warpgroup * self.how.slots + schedule.rem(i, self.how.slots)

    def _fetch(self, sources: list[Any], i: Int) -> None:
        """Starts to load a token that has an entry here."""
        how = self.how
        offset, token = self._place(i)
        slot = self._slot(i)
        own, wanted = how.tables.num_experts // how.team.size, jnp.bool_(False)
        low = self.results.first_expert
        for j in range(how.tables.top_k):
            entry = self.entries[self._entry(offset, token, j)]
            wanted |= (entry >= low) & (entry < low + own)

        @pl.when(wanted)
        def _():
            number = self._first_token() + token
            target = self.buffers.at[slot, pl.ds(0, how.row.parts)]
            of_device(
                sources,
                offset,
                lambda ref: load(ref.at[number], target, self.arrived.at[slot], flat=True),
            )

    def _entry(self, offset: Int, token: Int, choice: int) -> tuple[Int, ...]:
        """Where the tables have a choice of a token."""
        return offset, token * self.how.tables.top_k + choice

    def _step(self, sources: list[Any], i: Int, total: Int) -> None:
        """Stores token `i` to its rows, and loads another one into a slot that is free."""
        how = self.how
        offset, token = self._place(i)
        slot = self._slot(i)
        rows = [self.places[self._entry(offset, token, j)] for j in range(how.tables.top_k)]
        wanted = functools.reduce(jnp.logical_or, [row != NONE for row in rows])
        pl.when(wanted)(lambda: plgpu.barrier_wait(self.arrived.at[slot]))
        for row in rows:

            @pl.when(row != NONE)
            def _(row=row):
                plgpu.copy_smem_to_gmem(
                    self.buffers.at[slot, pl.ds(0, how.row.parts)],
                    self.rows.at[row],
                    commit_group=False,
                )

        plgpu.commit_smem_to_gmem_group()  # Of each token, also where it stores nothing.

        # Only the newest tokens' stores are unfinished: the one before has left its slot.
        @pl.when(i >= how.stores)
        def _():
            plgpu.wait_smem_to_gmem(how.stores, wait_read_only=True)
            following = i - how.stores + how.slots
            pl.when(following < total)(lambda: self._fetch(sources, following))
