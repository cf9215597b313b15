"""Kernel of `expert_combine`: each device adds up what its experts made of every token.

In every block some warpgroups make sums, whose rows a warp for each of them loads (`fed_sums`). They
store a token's sum at its owner, so that it crosses once from each device. XLA adds up what arrived;
or some of the blocks do, for the device's own tokens, while the others make the sums of the peers'
tokens (`token_totals`). In one block the two would hold each other up: stores that wait for the links
keep its loads waiting.

| object | written or signalled by | waited for by | count | proves |
|---|---|---|---|---|
| `inbox[d]` | device `d` | | | its sums |
| `closing` (`handshake`), without totals | every block of every peer | block 0 | all | all of `inbox` is in place, and this device's tables have been read |
| `arrived` (`token_totals`), with them | the peers | the warps that load | all | the same, chunk by chunk: no further handshake ends the kernel |
"""  # noqa: E501

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed import kernel, schedule
from stretto.distributed.semaphores import Semaphore, SemaphoreArray
from stretto.distributed.team import Team
from stretto.kernels.collectives import token_totals
from stretto.kernels.collectives.dispatch import ALL_BLOCKS, MOST_SLOTS, obstacle
from stretto.kernels.collectives.fed_sums import FedSums, fed
from stretto.kernels.collectives.summing import Summing, of_each, ring_of, shared
from stretto.kernels.collectives.token_sums import added_up
from stretto.kernels.collectives.token_tables import Chunks, Row, check_chunk
from stretto.kernels.collectives.token_totals import Totals
from stretto.kernels.operation import Call, Kernel
from stretto.kernels.problem.problem import Problem
from stretto.kernels.problem.routing import NONE

FEW_TOKENS, FEW_CHUNK = 128, 2  # Of all devices, and of a chunk.
TOTALS_CHUNK = 8  # Tokens of a chunk whose totals wait for the peers'.
SHORT_TOKENS, SHORT_CHUNK = 8192, 4  # Of all devices: the first and the last chunk count.
EVEN_BLOCKS = 128  # Whose shares of 2**n chunks are equal; some multiprocessors stay idle.
MANY_TOKENS = 4096  # Of all devices: chunks of 8 and more for two warpgroups of each block.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How a combine is cut up.

    Attributes:
      num_blocks: blocks that add; as many as the device has multiprocessors at most.
      chunk: tokens whose tables are read at once: a multiple of 8; or, of few tokens, 1, 2 or 4, so
        that more blocks have some.
      slots: rows of a warpgroup on their way at once, where they fit.
      warpgroups: of a block, which add apart from each other.
      flat: rows and tables are loaded by flat copies (`token_tables.load`).
      totals: of several devices the kernel also adds up their sums, in blocks that do that for the
        device's own tokens.
      senders: blocks that make the sums of the peers' tokens meanwhile; 0 for a share of all blocks
        for each peer.
    """

    num_blocks: int = ALL_BLOCKS
    chunk: int = 32
    slots: int = 24
    warpgroups: int = 1
    flat: bool = False
    totals: bool = False
    senders: int = 0

    def check(self, problem: Problem | None = None) -> None:
        """Raises ValueError unless the kernel can be built so."""
        del problem
        check_chunk(self.chunk)
        if not 2 <= self.slots <= MOST_SLOTS:
            raise ValueError(f"slots={self.slots} must be between 2 and {MOST_SLOTS}.")
        if not 1 <= self.warpgroups <= 4:
            raise ValueError(f"warpgroups={self.warpgroups} must be between 1 and 4.")
        if self.num_blocks < 1:
            raise ValueError(f"num_blocks={self.num_blocks} must be at least 1.")
        if not 0 <= self.senders < self.num_blocks:
            raise ValueError(
                f"senders={self.senders} must be at least 0, and less than"
                f" num_blocks={self.num_blocks}."
            )

    @staticmethod
    def candidates(problem: Problem | None = None) -> Iterator[Config]:
        """What the tuner tries, the likely ones first."""
        del problem
        yield Config()
        for chunk, slots in ((32, 12), (64, 24), (2, 24)):
            yield Config(chunk=chunk, slots=slots)
        for warpgroups in (2, 3, 4):
            yield Config(warpgroups=warpgroups)
        yield Config(flat=True)
        of_two_kinds = Config(totals=True, warpgroups=2, num_blocks=EVEN_BLOCKS)
        for chunk, senders in ((8, 0), (4, 0), (4, 52), (16, 0)):
            yield dataclasses.replace(of_two_kinds, chunk=chunk, senders=senders)


def default_config(problem: Problem) -> Config:
    """The configuration for a problem that no table has."""
    tokens = problem.sizes["t"]
    if tokens >= MANY_TOKENS:
        if problem.devices == 2:
            chunk = SHORT_CHUNK if tokens < SHORT_TOKENS else TOTALS_CHUNK
            return Config(warpgroups=2, totals=True, chunk=chunk, num_blocks=EVEN_BLOCKS)
        return Config(warpgroups=2)
    return Config(chunk=FEW_CHUNK) if tokens <= FEW_TOKENS else Config()


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
    tokens, top_k = positions.shape
    row = Row.of(rows.shape[1], rows.dtype.itemsize)
    if row is None:
        raise ValueError(
            f"rows of {rows.shape[1]} {rows.dtype} cannot be copied."
        )  # See `obstacle`.
    cut = config.chunk, config.num_blocks, config.warpgroups, config.flat
    chunks = Chunks.of(team, tokens, *cut)
    totals = config.totals and not team.is_alone and chunks.num_blocks > 1
    how = ring_of(
        row=row,
        top_k=top_k,
        chunks=chunks,
        dtype=rows.dtype,
        wire_dtype=wire_dtype,
        slots=config.slots,
        totals=totals,
    )
    shape = row.parts, row.columns
    inbox = jax.ShapeDtypeStruct((team.size, tokens, *shape), wire_dtype)
    given = _Given(rows.reshape(-1, *shape), positions, weights, inbox, interpret)
    if totals:
        return _totals(how, given, config.senders).reshape(tokens, -1)
    return added_up(_sums(how, given).reshape(team.size, tokens, -1), positions, rows.dtype)


class _Given(NamedTuple):
    """What both forms of the kernel get; `inbox` is a type."""

    rows: jax.Array
    positions: jax.Array
    weights: jax.Array
    inbox: jax.ShapeDtypeStruct
    interpret: Any


def _launch(how: Summing, given: _Given, body: Any, **options: Any) -> jax.Array:
    """The only result of the kernel."""
    chunks, table = how.chunks, how.chunks.table(how.top_k)
    (found,) = kernel.launch(
        body,
        given.rows,
        table.of_table(given.positions, NONE),
        table.of_table(given.weights.astype(jnp.float32), 0),
        name="expert_combine",
        team=chunks.team,
        num_blocks=chunks.num_blocks,
        num_threads=chunks.warpgroups + 1,  # The last one's warps load.
        interpret=given.interpret,
        **options,
    )
    return found


def _sums(how: Summing, given: _Given) -> jax.Array:
    """Every device's sums for this device's tokens, `[devices, tokens, parts, columns]`."""
    warpgroups = how.chunks.warpgroups

    def body(rows, positions, weights, inbox, **scratch):
        refs = dict(rows=rows, positions=positions, weights=weights, inbox=inbox, scratch=scratch)
        warpgroup = lax.axis_index(kernel.THREAD_AXIS)

        @pl.when(warpgroup < warpgroups)
        def _():
            FedSums.of(how, **refs).run()
            # Nothing else waits for the last stores where there are no peers to part from.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        @pl.when(warpgroup == warpgroups)
        def _():
            @plgpu.warp_map
            def _(warp):
                pl.when(warp < warpgroups)(FedSums.of(fed(how, warp), **refs).feed)

    return _launch(how, given, body, out_type=[given.inbox], all_wait=False, scratch=how.scratch())


def _totals(how: Summing, given: _Given, senders: int) -> jax.Array:
    """The sums over all devices, `[tokens, parts, columns]`."""
    warpgroups = how.chunks.warpgroups
    theirs, ours = how.split(senders)
    first = ours.chunks.first_block
    memory = {"their_": theirs.scratch(), "own_": token_totals.scratch(ours)}
    arrays, barriers = shared(memory)

    def body(rows, positions, weights, out, inbox, *, arrived, handshake, arrays, **barriers):
        scratch = of_each(memory, arrays, barriers)
        refs = dict(rows=rows, positions=positions, weights=weights, inbox=inbox)
        told, warpgroup = _told(theirs.chunks, arrived), lax.axis_index(kernel.THREAD_AXIS)
        sends, adds = kernel.block_id() < first, kernel.block_id() >= first

        def of_peers(how: Summing) -> FedSums:
            return FedSums.of(how, scratch=scratch["their_"], told=told, **refs)

        def of_own(how: Summing) -> Totals:
            return Totals.of(how, scratch=scratch["own_"], out=out, arrived=arrived, **refs)

        pl.when(sends & (warpgroup < warpgroups))(lambda: of_peers(theirs).run())

        @pl.when(adds & (warpgroup < warpgroups))
        def _():
            of_own(ours).run()
            plgpu.wait_smem_to_gmem(0, wait_read_only=False)

        @pl.when(warpgroup == warpgroups)
        def _():
            @plgpu.warp_map
            def _(warp):
                is_one = (warp == 0) & (kernel.block_id() == 0)

                @pl.when(warp < warpgroups)
                def _():
                    pl.when(is_one)(handshake.arrive)
                    handshake.wait()
                    pl.when(sends)(lambda: of_peers(fed(theirs, warp)).feed())
                    pl.when(adds)(lambda: of_own(fed(ours, warp)).feed())
                    pl.when(is_one)(handshake.wait_at_end)

    return _launch(
        how,
        given,
        body,
        out_type=[jax.ShapeDtypeStruct(given.inbox.shape[1:], given.rows.dtype)],
        symmetric=[given.inbox],
        semaphore_arrays=dict(arrived=SemaphoreArray((how.chunks.number,), restored=True)),
        scratch=dict(arrays=arrays, **barriers),
        waiting_warps=warpgroups,
    )


def _told(chunks: Chunks, arrived: Semaphore) -> Callable[[schedule.Int], None]:
    """Signals the owner of a chunk that its sums are in place."""
    team = chunks.team

    def tell(n: schedule.Int) -> None:
        offset, first = chunks.place(n)
        chunk = schedule.div(first, chunks.tokens)
        for peer in team.peer_offsets:

            @pl.when(offset == peer)
            def _(peer=peer):
                arrived.at[chunk].signal(peer_id=team.neighbour(peer))

    return tell


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
