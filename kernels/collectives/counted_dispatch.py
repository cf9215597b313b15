"""Kernel of `expert_dispatch` of many tokens that makes the tables as well, in the same launch.

The tokens of each device are cut into a chunk for each block. A block counts the experts in the chunk
of its own device's tokens, and stores the counts on all devices. While those of the other blocks
arrive, it loads tokens and finds the place of each entry among those of its chunk. The counts of the
chunks before then say which row that is (`chunk_tables`). The order of rows is that of
`kernels/xla/routing.py`.

| object | written or signalled by | waited for by | count | proves |
|---|---|---|---|---|
| `rows` | its device | | | the tokens of its experts |
| `counts[d]` | the blocks of device `d` | | | entries of each expert in each of its chunks |
| `counted` | every block of every device | every block | all | `counts` is complete |
| `entries_arrived[offset]` | the copy engine | both warpgroups | 1 | what a device's chunk chose is there |
| `counts_arrived[slot]` | the copy engine | the block | 1 | counts of some chunks are there |
| `found` | the warpgroups | the warpgroups | all | the first rows are found; then the rows of all entries |
| `arrived[slot]` | the copy engine | its warpgroup | 1 | a token is there |
| stores of the token `stores` before | | its warpgroup | all | its slot may be filled again |
| `closing` (`handshake`) | every block of every peer | block 0 | all | this device's tokens and choices have been read |
"""  # noqa: E501

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed import kernel, residency, schedule
from stretto.distributed.schedule import Int, ceil_div
from stretto.distributed.semaphores import Semaphore, SemaphoreArray
from stretto.distributed.team import Team
from stretto.kernels.collectives.chunk_tables import LANES, Shape, Tables
from stretto.kernels.collectives.counted_layout import COUNTS_BYTES, COUNTS_SLOTS, Layout
from stretto.kernels.collectives.token_tables import Row, everyones, load, of_device
from stretto.kernels.problem.routing import NONE

MOST_VECTORS = 16
"""Of `LANES` entries of a chunk: a thread holds an entry of each, and its place, in registers."""
MOST_EXPERTS = 512
WARPGROUPS = 2
"""Of a block, which share out the tables of the devices' chunks, and then the tokens."""
SMEM_BYTES = 220_000


def obstacle(
    tokens: int,
    top_k: int,
    devices: int,
    *,
    num_experts: int,
    width: int,
    itemsize: int,
    rows: int,
    num_blocks: int,
) -> str | None:
    """Why a kernel for the tokens of a device cannot make the tables too, None if it can."""
    blocks = min(num_blocks, residency.most_blocks_beside_others())
    shape = Shape.of(devices, ceil_div(tokens, blocks), top_k, num_experts)
    if shape.vectors > MOST_VECTORS:
        return f"a chunk has {MOST_VECTORS * LANES} entries at most, not {shape.entries}."
    if num_experts > MOST_EXPERTS:
        return f"it counts {MOST_EXPERTS} experts at most, not {num_experts}."
    if rows < devices * tokens * top_k:
        return f"rows may be dropped: capacity={rows} is less than {devices * tokens * top_k}."
    row = Row.of(width, itemsize)
    if row is None or _slots(shape, row.padded_bytes(itemsize)) < 2 * WARPGROUPS:
        return f"{2 * WARPGROUPS} rows of {width} do not fit into the shared memory of a block."
    return None


def _slots(shape: Shape, row_bytes: int) -> int:
    """Tokens that fit into shared memory beside the tables."""
    return (SMEM_BYTES - COUNTS_SLOTS * COUNTS_BYTES - shape.smem_bytes) // row_bytes


def dispatch(
    x: jax.Array,
    expert_index: jax.Array,
    team: Team,
    *,
    num_experts: int,
    rows: int,
    num_blocks: int,
    slots: int,
    stores: int,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`[tokens, d]`, int32 `[tokens, top_k]` -> rows, positions, and how many chose what.

    The last is int32 `[num_experts + 1]`, of all devices: each expert, and what is out of range.
    Rows of no token are not written.
    """
    (tokens, width), top_k = x.shape, expert_index.shape[1]
    row = Row.of(width, x.dtype.itemsize)
    if row is None:
        raise ValueError(f"rows of {width} {x.dtype} cannot be copied.")  # `obstacle` says so.
    blocks = min(num_blocks, residency.most_blocks_beside_others())
    shape = Shape.of(team.size, ceil_div(tokens, blocks), top_k, num_experts)
    most = _slots(shape, row.padded_bytes(x.dtype.itemsize))
    slots = max(2, min(slots, most, team.size * shape.tokens) // WARPGROUPS)
    how = Layout(
        team=team,
        row=row,
        tokens=tokens,
        num_blocks=blocks,
        warpgroups=WARPGROUPS,
        slots=slots,
        stores=min(stores, slots - 1),
        tables=shape,
    )

    def body(x_ref, index_ref, rows_ref, positions_ref, totals_ref, counts_ref, **scratch):
        results = dict(rows=rows_ref, positions=positions_ref, totals=totals_ref)
        refs = dict(x=x_ref, index=index_ref, counts=counts_ref)
        _Block(
            how=how,
            warpgroup=lax.axis_index(kernel.THREAD_AXIS),
            first_expert=team.device_id() * (num_experts // team.size),
            **results,
            **refs,
            **scratch,
        ).run()

    chunks = (blocks, shape.vectors, LANES)
    experts = (shape.expert_vectors, LANES)
    out, positions, totals = kernel.launch(
        body,
        x.reshape(tokens, row.parts, row.columns),
        how.in_chunks(expert_index),
        name="expert_dispatch_counted",
        team=team,
        out_type=[
            jax.ShapeDtypeStruct((rows, row.parts, row.columns), x.dtype),
            jax.ShapeDtypeStruct(chunks, jnp.int32),
            jax.ShapeDtypeStruct((2, *experts), jnp.int32),
        ],
        symmetric=[jax.ShapeDtypeStruct((team.size, blocks, *experts), jnp.int32)],
        semaphore_arrays=dict(counted=SemaphoreArray()),
        num_blocks=blocks,
        num_threads=WARPGROUPS,
        scratch=how.scratch(x.dtype),
        interpret=interpret,
    )
    totals = totals.reshape(2, -1)
    counts = jnp.concatenate([totals[0, :num_experts], totals[1, :1]])
    return out.reshape(rows, width), how.of_chunks(positions), counts


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Block:
    """One warpgroup of a block, in the kernel.

    Attributes:
      warpgroup: its number.
      first_expert: of this device, read once: in a loop with barriers it would be read from memory
        each time.
    """

    how: Layout
    warpgroup: Int
    first_expert: Int
    x: Any
    index: Any
    rows: Any
    positions: Any
    totals: Any
    counts: Any
    counted: Semaphore
    entries: Any
    entries_arrived: Any
    places: Any
    own_positions: Any
    own_counts: Any
    sums: Any
    firsts: Any
    found: Any
    counts_of: Any
    counts_arrived: Any
    buffers: Any
    arrived: Any

    def run(self) -> None:
        how, tables, is_first = self.how, self._tables(), self.warpgroup == 0
        pl.when(is_first)(lambda: self._count(tables))
        for offset in range(how.team.size):
            self._see(offset)
        sources = everyones(self.x, how.team)
        total = schedule.share(self._tokens() * how.team.size, self.warpgroup, how.warpgroups)
        at_once = jnp.minimum(how.slots, total)
        lax.fori_loop(0, at_once, lambda i, _: self._fetch(sources, i), None)
        pl.when(is_first)(self._tell)
        self._each(tables.rank)

        @pl.when(is_first)
        def _():
            self.counted.wait(how.num_blocks * how.team.size)
            tables.find_first_rows(self.counts, kernel.block_id())

        self._meet()
        self._each(lambda offset: tables.place(offset, self.first_expert))
        self._meet()
        pl.when(is_first)(self._store_tables)
        lax.fori_loop(0, total, lambda i, _: self._step(sources, i, total), None)
        # Nothing else waits for the last stores where there are no peers to part from.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def _count(self, tables: Tables) -> None:
        """Loads the entries of all devices' chunks, counts the own ones, and starts to tell."""
        for offset, ref in enumerate(everyones(self.index, self.how.team)):
            target, arrived = self.entries.at[offset], self.entries_arrived.at[offset]
            load(ref.at[kernel.block_id()], target, arrived, flat=True)
        plgpu.barrier_wait(self.entries_arrived.at[0])
        tables.count()
        self._publish_counts()

    def _see(self, offset: int) -> None:
        """Returns once the entries of a device's chunk are there."""
        if offset:
            plgpu.barrier_wait(self.entries_arrived.at[offset])
            return
        # The first warpgroup has waited for these.
        pl.when(self.warpgroup > 0)(lambda: plgpu.barrier_wait(self.entries_arrived.at[0]))

    def _each(self, fun: Callable[[int], None]) -> None:
        """Of the devices' chunks those that are this warpgroup's share."""
        for offset in range(self.how.team.size):
            mine = self.warpgroup == offset % self.how.warpgroups
            pl.when(mine)(lambda offset=offset: fun(offset))

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
            counts_of=self.counts_of,
            counts_arrived=self.counts_arrived,
        )

    def _tokens(self) -> Int:
        """Of each device, in this block's chunk."""
        each = self.how.tables.tokens
        return jnp.clip(self.how.tokens - kernel.block_id() * each, 0, each)

    def _publish_counts(self) -> None:
        """Starts to store the own counts on every device."""
        team = self.how.team
        for ref in everyones(self.counts, team):
            window = ref.at[team.device_id(), kernel.block_id()]
            plgpu.copy_smem_to_gmem(self.own_counts, window, commit_group=False)
        plgpu.commit_smem_to_gmem_group()

    def _tell(self) -> None:
        """Publishes to every device that the own counts are in place."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=False)
        self.counted.signal()
        for offset in self.how.team.peer_offsets:
            self.counted.signal(peer_id=self.how.team.neighbour(offset))

    def _store_tables(self) -> None:
        """Starts to store the positions of the own chunk, and in one block the totals."""
        plgpu.copy_smem_to_gmem(
            self.own_positions, self.positions.at[kernel.block_id()], commit_group=False
        )

        @pl.when(kernel.block_id() == 0)
        def _():
            plgpu.copy_smem_to_gmem(self.sums, self.totals, commit_group=False)

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
        for j in range(how.tables.top_k):
            entry = self.entries[self._entry(offset, token, j)]
            wanted |= (entry >= self.first_expert) & (entry < self.first_expert + own)

        @pl.when(wanted)
        def _():
            number = kernel.block_id() * how.tables.tokens + token
            target = self.buffers.at[slot, pl.ds(0, how.row.parts)]
            of_device(
                sources,
                offset,
                lambda ref: load(ref.at[number], target, self.arrived.at[slot], flat=True),
            )

    def _entry(self, offset: Int, token: Int, choice: int) -> tuple[Int, ...]:
        """Where the tables have a choice of a token."""
        top_k = self.how.tables.top_k
        if LANES % top_k == 0:  # Of a token they lie side by side, which the compiler sees so.
            vector = schedule.div(token, LANES // top_k)
            return offset, vector, (token - vector * (LANES // top_k)) * top_k + choice
        number = token * top_k + choice
        vector = schedule.div(number, LANES)
        return offset, vector, number - vector * LANES

    def _step(self, sources: list[Any], i: Int, total: Int) -> None:
        """Stores token `i` to its rows, and loads another one into a slot that is free."""
        how = self.how
        offset, token = self._place(i)
        slot = self._slot(i)
        rows = [self.places[self._entry(offset, token, j)] for j in range(how.tables.top_k)]
        wanted = rows[0] != NONE
        for row in rows[1:]:
            wanted |= row != NONE
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
