"""Kernel of `expert_combine`: each device adds up what its experts made of every token.

All blocks make sums (`token_sums`, which has most of the protocol). A token crosses once from each
device. XLA adds up what arrived; or other warpgroups of the kernel do, beside those that make the
sums of the peers' tokens (`token_totals`).

| object | written or signalled by | waited for by | count | proves |
|---|---|---|---|---|
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
from stretto.distributed.semaphores import SemaphoreArray
from stretto.distributed.team import Team
from stretto.kernels.collectives import fed_combine, token_totals
from stretto.kernels.collectives.dispatch import ALL_BLOCKS, MOST_SLOTS, SMEM_BYTES, obstacle
from stretto.kernels.collectives.summing import Piece, Summing, direct_piece, piece_of, sum_bytes
from stretto.kernels.collectives.token_sums import Sums, added_up
from stretto.kernels.collectives.token_tables import Chunks, Row, check_chunk
from stretto.kernels.collectives.token_totals import Totals
from stretto.kernels.operation import Call, Kernel
from stretto.kernels.problem.problem import Problem
from stretto.kernels.problem.routing import NONE

FEW_TOKENS, FEW_CHUNK = 128, 2  # Of all devices, and of a chunk.
FEW_ROWS, TOTALS_CHUNK = 2, 8  # Of a token, and tokens of a chunk then.
MANY_TOKENS = 4096  # Of all devices: chunks of 8 and more for two warpgroups of each block.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How a combine is cut up.

    Attributes:
      num_blocks: blocks that add; as many as the device has multiprocessors at most.
      chunk: tokens whose tables are read at once: a multiple of 8; or, of few tokens, 1, 2 or 4, so
        that more blocks have some.
      stages: sums of a warpgroup whose rows are on their way at once, where they fit.
      warpgroups: of a block, which add apart from each other.
      flat: rows and tables are loaded by flat copies (`token_tables.load`).
      totals: of several devices the kernel also adds up their sums: of `warpgroups`, which are two
        or more, a device's share does that for its own tokens.
      direct: rows go to registers, not through shared memory, where they are multiples of 2 KB.
        On two H200s it gave XLA's sums; it was not timed.
      ring: slots of each warpgroup for rows that a warp of its own loads (`fed_sums`), as far as
        they fit; 0 where the warpgroup loads them itself.
    """

    num_blocks: int = ALL_BLOCKS
    chunk: int = 32
    stages: int = 4
    warpgroups: int = 1
    flat: bool = False
    totals: bool = False
    direct: bool = False
    ring: int = 0

    def check(self, problem: Problem | None = None) -> None:
        """Raises ValueError unless the kernel can be built so."""
        del problem
        check_chunk(self.chunk)
        if not 2 <= self.stages <= 8:
            raise ValueError(f"stages={self.stages} must be between 2 and 8.")
        if not 1 <= self.warpgroups <= 4:
            raise ValueError(f"warpgroups={self.warpgroups} must be between 1 and 4.")
        if self.totals and self.warpgroups < 2:
            raise ValueError(f"warpgroups={self.warpgroups} must be 2 or more with totals.")
        if self.num_blocks < 1:
            raise ValueError(f"num_blocks={self.num_blocks} must be at least 1.")
        if not (self.ring == 0 or 2 <= self.ring <= MOST_SLOTS):
            raise ValueError(f"ring={self.ring} must be 0, or between 2 and {MOST_SLOTS}.")

    @staticmethod
    def candidates(problem: Problem | None = None) -> Iterator[Config]:
        """What the tuner tries, the likely ones first."""
        del problem
        yield Config()
        for chunk, stages in ((32, 2), (32, 6), (64, 4), (2, 4)):
            yield Config(chunk=chunk, stages=stages)
        for warpgroups in (2, 4):
            yield Config(warpgroups=warpgroups)
        yield Config(flat=True)
        for warpgroups, chunk in ((2, 8), (2, 16), (4, 8)):
            yield Config(totals=True, warpgroups=warpgroups, chunk=chunk)
        for warpgroups in (3, 4):
            yield Config(direct=True, warpgroups=warpgroups)
            yield Config(direct=True, totals=True, warpgroups=warpgroups, chunk=8)


def default_config(problem: Problem) -> Config:
    """The configuration for a problem that no table has, by times on two H200s.

    Two warpgroups of each block add up many tokens, where each has room for two sums of whole
    rows. With rows of 2048 bfloat16 numbers and top_k 8 they were faster by a tenth, with 4096 and
    top_k 2 as fast, with 7168 and top_k 8, for which there is no room, slower. One that makes sums
    and one that makes totals took 0.85 of the time with 4096 and top_k 2, whose sums are half of
    what is read, and with top_k 8 longer (1.11). Small chunks took 0.79 of the time with 128
    tokens, and as long with 2, and with 512, whose blocks fill a GPU.
    """
    sizes = problem.sizes
    needed = sum_bytes(sizes["top_k"], problem.types.itemsize) * sizes["d"]
    if sizes["t"] >= MANY_TOKENS and 2 * needed <= SMEM_BYTES:
        if sizes["top_k"] <= FEW_ROWS and problem.devices == 2:
            return Config(warpgroups=2, totals=True, chunk=TOTALS_CHUNK)
        return Config(warpgroups=2)
    return Config(chunk=FEW_CHUNK) if sizes["t"] <= FEW_TOKENS else Config()


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
    cut = config.chunk, config.num_blocks, config.warpgroups, config.flat
    chunks = Chunks.of(team, tokens, *cut)
    if config.ring:
        return fed_combine.combine(
            rows, weights, positions, row, chunks, wire_dtype, config, interpret
        )
    if config.totals and not team.is_alone:
        return _totals(rows, weights, positions, row, chunks, wire_dtype, config, interpret)
    inbox = _sums(rows, weights, positions, row, chunks, wire_dtype, config, interpret)
    return added_up(inbox.reshape(team.size, tokens, width), positions, rows.dtype)


def _piece(
    row: Row, itemsize: int, top_k: int, room: int, config: Config, peers: int = 0
) -> tuple[Piece, bool]:
    """(the part of a row that is summed at once, whether it goes straight to registers)."""
    if config.direct and (piece := direct_piece(row, itemsize, top_k, config.warpgroups)):
        return piece, True
    return piece_of(row, itemsize, top_k, room, peers), False


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
    each = SMEM_BYTES // chunks.warpgroups
    piece, direct = _piece(row, itemsize, top_k, each, config)
    elements = piece.padded * row.columns
    room = (each - 8 * elements) // (top_k * elements * itemsize)
    how = Summing(
        row=row,
        piece=piece,
        top_k=top_k,
        stages=max(2, min(config.stages, chunks.tokens, room)),
        chunks=chunks,
        dtype=rows.dtype,
        wire_dtype=wire_dtype,
        direct=direct,
    )
    table = chunks.padded(positions, NONE)
    factors = chunks.padded(weights.astype(jnp.float32), 0)

    def body(rows_ref, positions_ref, weights_ref, inbox_ref, **scratch):
        Sums.of(
            how,
            rows=rows_ref,
            positions=positions_ref,
            weights=weights_ref,
            inbox=inbox_ref,
            scratch=scratch,
        ).run()
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
        num_threads=chunks.warpgroups,
        scratch=how.scratch(),
        interpret=interpret,
    )
    return inbox


def _totals(
    rows: jax.Array,
    weights: jax.Array,
    positions: jax.Array,
    row: Row,
    chunks: Chunks,
    wire_dtype: Any,
    config: Config,
    interpret: Any,
) -> jax.Array:
    """The sums over all devices, `[tokens, d]`."""
    team, (tokens, top_k) = chunks.team, positions.shape
    itemsize, wire_size = rows.dtype.itemsize, jnp.dtype(wire_dtype).itemsize
    each = SMEM_BYTES // chunks.warpgroups
    piece, direct = _piece(row, itemsize, top_k, each, config, team.size - 1)
    elements = piece.padded * row.columns
    stage = (top_k * itemsize + (team.size - 1) * wire_size) * elements
    own = max(1, chunks.warpgroups // team.size)
    ours, theirs = (
        Summing(
            row=row,
            piece=piece,
            top_k=top_k,
            stages=max(2, min(config.stages, chunks.tokens, (each - 12 * elements) // stage)),
            chunks=dataclasses.replace(
                chunks, whose=whose, warpgroups=number, first_warpgroup=first
            ),
            dtype=rows.dtype,
            wire_dtype=wire_dtype,
            direct=direct,
        )
        for whose, number, first in (
            (range(1), own, chunks.warpgroups - own),
            (range(1, team.size), chunks.warpgroups - own, 0),
        )
    )

    def body(rows_ref, positions_ref, weights_ref, out_ref, inbox_ref, *, arrived, **scratch):
        refs = dict(rows=rows_ref, positions=positions_ref, weights=weights_ref, inbox=inbox_ref)
        of_role = lambda role: {x: scratch[role + x] for x in names[role]}  # noqa: E731
        warpgroup = lax.axis_index(kernel.THREAD_AXIS)

        def tell(n: Any) -> None:
            offset, first = theirs.chunks.place(n)
            chunk = schedule.div(first, chunks.tokens)
            for peer in team.peer_offsets:

                @pl.when(offset == peer)
                def _(peer=peer):
                    arrived.at[chunk].signal(peer_id=team.neighbour(peer))

        @pl.when(warpgroup < theirs.chunks.warpgroups)
        def _():
            Sums.of(theirs, **refs, scratch=of_role("their_"), told=tell).run()

        @pl.when(warpgroup >= theirs.chunks.warpgroups)
        def _():
            Totals.made(ours, **refs, out=out_ref, arrived=arrived, scratch=of_role("own_")).run()

    memory = {"their_": theirs.scratch(), "own_": token_totals.scratch(ours)}
    names = {role: list(each) for role, each in memory.items()}
    shape = row.parts, row.columns
    (out,) = kernel.launch(
        body,
        rows.reshape(rows.shape[0], *shape),
        chunks.padded(positions, NONE),
        chunks.padded(weights.astype(jnp.float32), 0),
        name="expert_combine",
        team=team,
        out_type=[jax.ShapeDtypeStruct((tokens, *shape), rows.dtype)],
        symmetric=[jax.ShapeDtypeStruct((team.size, tokens, *shape), wire_dtype)],
        semaphore_arrays=dict(arrived=SemaphoreArray((chunks.number,))),
        num_blocks=chunks.num_blocks,
        num_threads=chunks.warpgroups,
        scratch={role + x: y for role, each in memory.items() for x, y in each.items()},
        interpret=interpret,
    )
    return out.reshape(tokens, -1)


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
    default=default_config,
    candidates=Config.candidates,
    untried=True,
)
