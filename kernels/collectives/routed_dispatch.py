"""Kernel of `expert_dispatch` of few tokens that makes the tables as well, in the same launch.

Every block reads the choices of all devices' tokens. A row is the number of entries that come before
it, so each block counts them for its own tokens by comparisons, and nothing else has to be exchanged.
It starts to load its tokens before it counts. The order of rows is that of `kernels/xla/routing.py`.

| object | written or signalled by | waited for by | count | proves |
|---|---|---|---|---|
| `rows` | its device | | | the tokens of its experts |
| `entries_arrived` | the copy engine | the block | each device | what all tokens chose is there |
| `arrived[i]` | the copy engine | the block | 1 | the block's token `i` is there |
| `closing` (`handshake`) | every block of every peer | block 0 | all | this device's tokens and choices have been read |
"""  # noqa: E501

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed import kernel, residency, schedule
from stretto.distributed.copies import MOST_BARRIERS
from stretto.distributed.schedule import Int, ceil_div
from stretto.distributed.team import Team
from stretto.kernels.collectives.table_results import TableResults, as_routing
from stretto.kernels.collectives.token_tables import Row, everyones, load, of_device
from stretto.kernels.problem.routing import NONE, Routing

MOST_ENTRIES = 4096
"""Of all devices: each thread holds 32 of them in registers."""
SMEM_BYTES = 180_000
LANES = 128
ALIGNED_ENTRIES = 4
"""Of the copy engine."""
MOST_TOKENS = MOST_BARRIERS
"""Of a block, which takes them all at once, with a barrier each."""


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
    entries = devices * ceil_div(tokens * top_k, LANES) * LANES
    if entries > MOST_ENTRIES:
        return f"it compares {MOST_ENTRIES} choices of all devices at most, not {entries}."
    if top_k > LANES:
        return f"it takes {LANES} choices of a token at most, not top_k={top_k}."
    if (num_experts + 1) * entries >= 2**31:
        return f"its keys count experts times choices, and num_experts={num_experts} is too many."
    if rows < devices * tokens * top_k:
        return f"rows may be dropped: capacity={rows} is less than {devices * tokens * top_k}."
    row = Row.of(width, itemsize)
    own = ceil_div(devices * tokens, _blocks_for(devices * tokens, num_blocks))
    if own > MOST_TOKENS:
        return f"a block takes {MOST_TOKENS} tokens of all devices at most, not {own}."
    if row is None or own * (row.padded_bytes(itemsize) + 4 * LANES) > SMEM_BYTES:
        return f"{own} rows of {width} do not fit into the shared memory of a block."
    return None


def _blocks_for(tokens: int, num_blocks: int) -> int:
    """Blocks for the tokens of all devices."""
    return min(tokens, num_blocks, residency.most_blocks_beside_others())


def dispatch(
    x: jax.Array,
    expert_index: jax.Array,
    team: Team,
    *,
    num_experts: int,
    rows: int,
    num_blocks: int,
    interpret: Any = None,
) -> tuple[jax.Array, Routing]:
    """`[tokens, d]`, int32 `[tokens, top_k]` -> rows and tables.

    Rows of no token are not written.
    """
    tokens, width = x.shape
    top_k = expert_index.shape[1]
    row = Row.of(width, x.dtype.itemsize)
    if row is None:
        raise ValueError(f"rows of {width} {x.dtype} cannot be copied.")  # `obstacle` says so.
    blocks = _blocks_for(team.size * tokens, num_blocks)
    how = _How(
        team=team,
        row=row,
        tokens=tokens,
        top_k=top_k,
        num_experts=num_experts,
        num_blocks=blocks,
    )

    def body(x, index, rows, positions, group_sizes, tokens_per_expert, out_of_range, **scratch):
        results = TableResults(
            positions=positions,
            group_sizes=group_sizes,
            tokens_per_expert=tokens_per_expert,
            out_of_range=out_of_range,
            first_expert=team.device_id() * (num_experts // team.size),
        )
        _Block(how=how, x=x, index=index, rows=rows, results=results, **scratch).run()

    index = expert_index.reshape(-1)
    if how.loaded > index.size:
        index = jnp.pad(index, (0, how.loaded - index.size), constant_values=NONE)
    out, *tables = kernel.launch(
        body,
        x.reshape(tokens, row.parts, row.columns),
        index,
        name="expert_dispatch_with_tables",
        team=team,
        out_type=[
            jax.ShapeDtypeStruct((rows, row.parts, row.columns), x.dtype),
            *TableResults.types(tokens * top_k, num_experts, team.size),
        ],
        num_blocks=blocks,
        all_wait=False,
        scratch=how.scratch(x.dtype),
        interpret=interpret,
    )
    return out.reshape(rows, width), as_routing(tables, expert_index.shape)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _How:
    """What is known before there is any memory."""

    team: Team
    row: Row
    tokens: int
    top_k: int
    num_experts: int
    num_blocks: int

    @property
    def loaded(self) -> int:
        """Entries of a device, with those that fill up what the copy engine takes."""
        return ceil_div(self.tokens * self.top_k, ALIGNED_ENTRIES) * ALIGNED_ENTRIES

    @property
    def room(self) -> int:
        """For those of a device; each thread holds as many."""
        return ceil_div(self.loaded, LANES) * LANES

    @property
    def entries(self) -> int:
        """Of all devices, with the room that is left."""
        return self.team.size * self.room

    def scratch(self, dtype: Any) -> dict[str, Any]:
        """Shared memory and barriers, by name."""
        own = ceil_div(self.team.size * self.tokens, self.num_blocks)
        return dict(
            entries=plgpu.SMEM((self.entries,), jnp.int32),
            entries_arrived=plgpu.Barrier(num_arrivals=self.team.size),
            buffers=plgpu.SMEM((own, self.row.padded, self.row.columns), dtype),
            arrived=plgpu.Barrier(num_barriers=own),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Block:
    """A block, in the kernel."""

    how: _How
    x: Any
    index: Any
    rows: Any
    results: TableResults
    entries: Any
    entries_arrived: Any
    buffers: Any
    arrived: Any

    def run(self) -> None:
        how = self.how
        block, own = kernel.block_id(), self.buffers.shape[0]
        total = how.team.size * how.tokens
        self._clear_ends()
        for offset, ref in enumerate(everyones(self.index, how.team)):
            target = self.entries.at[pl.ds(how.team.neighbour(offset) * how.room, how.loaded)]
            load(ref, target, self.entries_arrived, flat=True)
        sources = everyones(self.x, how.team)
        for i in range(own):
            pl.when(block + i * how.num_blocks < total)(lambda i=i: self._fetch(sources, i))
        plgpu.barrier_wait(self.entries_arrived)
        keys = self._keys()
        tokens = schedule.share(total, block, how.num_blocks)
        lax.fori_loop(0, tokens, lambda i, _: self._send(keys, i), None)
        counts = schedule.share(how.num_experts + 1, block, how.num_blocks)
        lax.fori_loop(0, counts, lambda i, _: self._count(keys, i), None)
        # Nothing else waits for the last stores where there are no peers to part from.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def _clear_ends(self) -> None:
        """Writes none to the room that is left, before entries are loaded."""
        how = self.how
        if how.loaded < how.room:
            layout = plgpu.Layout.WG_STRIDED((LANES,), 1)
            nothing = plgpu.layout_cast(jnp.full((LANES,), NONE, jnp.int32), layout)
            for device in range(how.team.size):
                self.entries[pl.ds((device + 1) * how.room - LANES, LANES)] = nothing
            plgpu.commit_smem()

    def _place(self, i: Int) -> tuple[Int, Int]:
        """(whose, which) the block's token `i` is; whose as an offset on the ring."""
        number = kernel.block_id() + i * self.how.num_blocks
        token = schedule.div(number, self.how.team.size)
        return number - token * self.how.team.size, token

    def _fetch(self, sources: list[Any], i: int) -> None:
        offset, token = self._place(i)
        target = self.buffers.at[i, pl.ds(0, self.how.row.parts)]
        of_device(
            sources,
            offset,
            lambda ref: load(ref.at[token], target, self.arrived.at[i], flat=True),
        )

    def _keys(self) -> jax.Array:
        """Of each entry `expert * entries + number`, in the order of rows; of none -1."""
        how, shape = self.how, self.entries.shape
        layout = plgpu.Layout.WG_STRIDED(shape, 1)
        entry = plgpu.layout_cast(self.entries[...], layout)
        number = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout)
        stray = how.num_experts
        kind = jnp.where(entry >= 0, jnp.where(entry < stray, entry, stray), stray)
        return jnp.where(entry == NONE, -1, kind * how.entries + number)

    def _between(self, keys: jax.Array, low: Int, high: Int) -> jax.Array:
        """How many keys are at least `low` and below `high`, which is not below `low`."""
        return jnp.sum(jnp.where(keys < high, 1, 0) - jnp.where(keys < low, 1, 0))

    def _send(self, keys: jax.Array, i: Int) -> None:
        """Stores a token to its rows here, and at its owner also its positions."""
        how, me = self.how, self.how.team.device_id()
        offset, token = self._place(i)
        whose = schedule.rem(me + offset, how.team.size)
        first = whose * how.room + token * how.top_k
        own, found, positions = how.num_experts // how.team.size, [], []
        for j in range(how.top_k):
            number = first + j
            entry = self.entries[number]
            goes = (entry >= 0) & (entry < how.num_experts)
            device = schedule.div(entry, own)
            low = device * (own * how.entries)
            row = self._between(keys, low, entry * how.entries + number)
            found.append((goes & (device == me), row))
            positions.append(lax.select(goes, row * how.team.size + device, jnp.int32(NONE)))

        @pl.when(offset == 0)
        def _():
            for j, position in enumerate(positions):
                self.results.positions[token * how.top_k + j] = position

        plgpu.barrier_wait(self.arrived.at[i])
        for here, row in found:

            @pl.when(here)
            def _(row=row):
                plgpu.copy_smem_to_gmem(
                    self.buffers.at[i, pl.ds(0, how.row.parts)],
                    self.rows.at[row],
                    commit_group=False,
                )

        plgpu.commit_smem_to_gmem_group()

    def _count(self, keys: jax.Array, i: Int) -> None:
        """Stores how many entries an expert has, or how many are out of range."""
        expert = kernel.block_id() + i * self.how.num_blocks
        low = expert * self.how.entries
        self.results.store_count(expert, self._between(keys, low, low + self.how.entries))
