"""Kernel of `expert_combine`: each device adds up what its experts made of every token.

A block walks through chunks of all devices' tokens. Of each it reads where the owner's entries are
(`positions`) and their weights, loads the rows of those that are here, adds them up in float32 in the
order of the token's choices, and stores the sum in the owner's `inbox`, in the slot of this device.
XLA adds the slots up afterwards, in the order of the devices: so the result has the same bits in
every run. A token crosses once from each device.

| object | written or signalled by | waited for by | count | proves |
|---|---|---|---|---|
| `inbox[d]` | device `d` | | | its sums |
| `tables.arrived[slot]` | the copy engine | the block | 2 | a chunk of positions and weights is there |
| `loaded[j][stage]` | the copy engine | the block | 1 | the row of choice `j` is there |
| stores of the sum before last | | the block | all | its slot may be written again |
| `closing` (`handshake`) | every block of every peer | block 0 | all | all of `inbox` is in place, and this device's tables have been read |
"""  # noqa: E501

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed import kernel, schedule
from stretto.distributed.team import Team
from stretto.kernels.collectives.dispatch import ALL_BLOCKS, SMEM_BYTES, obstacle
from stretto.kernels.collectives.token_tables import (
    REGISTER_BYTES,
    TABLE_SLOTS,
    Chunks,
    Row,
    Tables,
    everyones,
    of_device,
)
from stretto.kernels.operation import Call, Kernel
from stretto.kernels.problem.problem import Problem
from stretto.kernels.problem.routing import NONE

MOST_ELEMENTS = 4096  # Of a sum, 32 registers of each thread.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How a combine is cut up.

    Attributes:
      num_blocks: blocks that add; as many as the device has multiprocessors at most.
      chunk: tokens whose tables are read at once; a multiple of 8.
      stages: sums of a block whose rows are on their way at once, where they fit.
    """

    num_blocks: int = ALL_BLOCKS
    chunk: int = 32
    stages: int = 4

    def check(self, problem: Problem | None = None) -> None:
        """Raises ValueError unless the kernel can be built so."""
        del problem
        if self.chunk % 8 or not 8 <= self.chunk <= 256:
            raise ValueError(f"chunk={self.chunk} must be a multiple of 8 from 8 to 256.")
        if not 2 <= self.stages <= 8:
            raise ValueError(f"stages={self.stages} must be between 2 and 8.")
        if self.num_blocks < 1:
            raise ValueError(f"num_blocks={self.num_blocks} must be at least 1.")

    @staticmethod
    def candidates(problem: Problem | None = None) -> Iterator[Config]:
        """What the tuner tries, the likely ones first."""
        del problem
        yield Config()
        for chunk, stages in ((32, 2), (32, 6), (64, 4)):
            yield Config(chunk=chunk, stages=stages)


@dataclasses.dataclass(frozen=True)
class Piece:
    """A piece of a row that is summed at once: `parts` of the row's, `padded` in shared memory."""

    parts: int
    padded: int

    @classmethod
    def of(cls, row: Row, itemsize: int, top_k: int) -> Piece:
        """The largest that fits registers, and twice into shared memory for all choices."""
        for parts in range(row.parts, 0, -1):
            padded = parts
            while padded * row.columns * itemsize % REGISTER_BYTES:
                padded += 1
            elements = padded * row.columns
            fits = (2 * top_k * itemsize + 2 * 4) * elements <= SMEM_BYTES
            if row.parts % parts == 0 and fits and elements <= MOST_ELEMENTS:
                return cls(parts, padded)
        raise ValueError(f"top_k={top_k} rows of {row} do not fit into the shared memory.")


def combine(
    rows: jax.Array,
    weights: jax.Array,
    positions: jax.Array,
    team: Team,
    *,
    wire_dtype: Any,
    config: Config = Config(),
    interpret: Any = None,
) -> jax.Array:
    """`[rows, d]`, float32 and int32 `[tokens, top_k]` -> `[tokens, d]`, in the rows' type."""
    tokens = positions.shape[0]
    width = rows.shape[1]
    row = Row.of(width, rows.dtype.itemsize)
    if row is None:
        raise ValueError(f"rows of {width} {rows.dtype} cannot be copied.")  # `obstacle` says so.
    chunks = Chunks.of(team, tokens, config.chunk, config.num_blocks)
    inbox = _sums(rows, weights, positions, row, chunks, wire_dtype, config, interpret)
    return _added_up(inbox.reshape(team.size, tokens, width), positions, rows.dtype)


def _added_up(inbox: jax.Array, positions: jax.Array, dtype: Any) -> jax.Array:
    """The sum over devices, in their order; slots that nobody wrote may hold anything."""
    devices = inbox.shape[0]
    total = jnp.zeros(inbox.shape[1:], jnp.float32)
    for device in range(devices):
        has = jnp.any((positions != NONE) & (positions % devices == device), axis=1)
        total += jnp.where(has[:, None], inbox[device].astype(jnp.float32), 0)
    return total.astype(dtype)


def _sums(
    rows: jax.Array,
    weights: jax.Array,
    positions: jax.Array,
    row: Row,
    chunks: Chunks,
    wire_dtype: Any,
    config: Config,
    interpret: Any,
) -> jax.Array:
    """Every device's sums for this device's tokens, `[devices, tokens, parts, columns]`."""
    team, (tokens, top_k) = chunks.team, positions.shape
    itemsize = rows.dtype.itemsize
    piece = Piece.of(row, itemsize, top_k)
    pieces = row.parts // piece.parts
    elements = piece.padded * row.columns
    room = (SMEM_BYTES - 8 * elements) // (top_k * elements * itemsize)
    stages = max(2, min(config.stages, chunks.tokens, room))
    # Eight bytes a thread at once.
    layout = plgpu.Layout.WG_STRIDED((piece.padded, row.columns), 8 // itemsize)
    table = chunks.padded(positions, NONE)
    factors = chunks.padded(weights.astype(jnp.float32), 0)

    def body(
        rows_ref,
        positions_ref,
        weights_ref,
        inbox_ref,
        *,
        table,
        factors,
        table_arrived,
        buffers,
        sums,
        **loaded_refs,
    ):
        loaded = [loaded_refs[f"loaded{j}"] for j in range(top_k)]
        tables = Tables(
            chunks=chunks,
            sources=[everyones(positions_ref, team), everyones(weights_ref, team)],
            slots=[table, factors],
            arrived=table_arrived,
        )
        inboxes = everyones(inbox_ref, team)
        me = team.device_id()
        total = chunks.own * chunks.tokens * pieces

        def place(i):
            """(chunk, the token in it, the window of a row) of this block's sum `i`."""
            n = schedule.div(i, chunks.tokens * pieces)
            rest = i - n * (chunks.tokens * pieces)
            token = schedule.div(rest, pieces)
            return n, token, rest - token * pieces

        def fetch(i):
            n, token, part = place(i)
            pl.when((token == 0) & (part == 0))(lambda: tables.enter(n))
            stage = schedule.rem(i, stages)
            for j in range(top_k):
                here, number = tables.row(n, token, j)

                @pl.when(here)
                def _(j=j, number=number):
                    plgpu.copy_gmem_to_smem(
                        rows_ref.at[number, pl.ds(part * piece.parts, piece.parts)],
                        buffers.at[stage, j, pl.ds(0, piece.parts)],
                        loaded[j].at[stage],
                    )

        def add(i):
            n, token, part = place(i)
            stage, slot = schedule.rem(i, stages), schedule.rem(i, 2)
            sum_ = plgpu.layout_cast(jnp.zeros((piece.padded, row.columns), jnp.float32), layout)
            wanted = False
            for j in range(top_k):
                here, _row = tables.row(n, token, j)
                wanted = here | wanted

                def added(sum_, j=j):
                    plgpu.barrier_wait(loaded[j].at[stage])
                    weight = factors[schedule.rem(n, TABLE_SLOTS), token, j]
                    return sum_ + weight * buffers[stage, j].astype(jnp.float32)

                sum_ = lax.cond(here, added, lambda sum_: sum_, sum_)

            # At most the sum before is still being stored: the one before that has left its slot.
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)

            @pl.when(wanted)
            def _():
                sums[slot] = sum_.astype(wire_dtype)
                plgpu.commit_smem()
                offset, first = chunks.place(n)
                window = pl.ds(part * piece.parts, piece.parts)
                of_device(
                    inboxes,
                    offset,
                    lambda ref: plgpu.copy_smem_to_gmem(
                        sums.at[slot, pl.ds(0, piece.parts)],
                        ref.at[me, first + token, window],
                        commit_group=False,
                    ),
                )

            plgpu.commit_smem_to_gmem_group()  # Of each sum, also where there is none.

        def step(i, _):
            add(i)
            pl.when(i + stages < total)(lambda: fetch(i + stages))

        if piece.padded != piece.parts:
            _clear(buffers, layout)  # What pads a row stays zero.
        tables.fetch(jnp.int32(0))
        for i in range(stages):
            pl.when(i < total)(lambda i=i: fetch(jnp.int32(i)))
        lax.fori_loop(0, total, step, None)
        # Nothing else waits for the last stores where there are no peers to part from.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    shape = (rows.shape[0], row.parts, row.columns)
    (inbox,) = kernel.launch(
        body,
        rows.reshape(shape),
        table,
        factors,
        name="expert_combine",
        team=team,
        out_type=[jax.ShapeDtypeStruct((team.size, tokens, row.parts, row.columns), wire_dtype)],
        num_blocks=chunks.num_blocks,
        scratch=dict(
            table=chunks.scratch(table.shape[1], jnp.int32),
            factors=chunks.scratch(table.shape[1], jnp.float32),
            table_arrived=plgpu.Barrier(num_arrivals=2, num_barriers=TABLE_SLOTS),
            buffers=plgpu.SMEM((stages, top_k, piece.padded, row.columns), rows.dtype),
            sums=plgpu.SMEM((2, piece.padded, row.columns), wire_dtype),
            **{f"loaded{j}": plgpu.Barrier(num_barriers=stages) for j in range(top_k)},
        ),
        interpret=interpret,
    )
    return inbox


def _clear(buffers: Any, layout: Any) -> None:
    """Zeros in shared memory `[stages, top_k, parts, columns]`."""
    stages, top_k, *shape = buffers.shape

    def clear(stage, _):
        for j in range(top_k):
            buffers[stage, j] = plgpu.layout_cast(jnp.zeros(shape, buffers.dtype), layout)

    lax.fori_loop(0, stages, clear, None)
    plgpu.commit_smem()


def _run(operands: tuple[jax.Array, jax.Array, jax.Array], call: Call) -> jax.Array:
    rows, weights, positions = operands
    return combine(
        rows,
        weights,
        positions,
        Team.along(call.axes),
        wire_dtype=call.options.wire_dtype,
        config=call.config,
        interpret=call.interpret,
    )


def _obstacle(problem: Problem) -> str | None:
    found = obstacle(problem, ("bfloat16", "float16", "float32"))
    if found is None and problem.sizes["top_k"] > 16:
        return f"the kernel adds up to 16 rows a token, not top_k={problem.sizes['top_k']}."
    return found


KERNEL = Kernel(
    Config=Config,
    run=_run,
    obstacle=_obstacle,
    default=lambda problem: Config(),
    candidates=Config.candidates,
    untried=True,
)
