"""The two forms of the combine whose rows warps of their own load: with XLA's addition, and without."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed import kernel, schedule
from stretto.distributed.semaphores import SemaphoreArray
from stretto.kernels.collectives import fed_totals
from stretto.kernels.collectives.dispatch import MOST_SLOTS, SMEM_BYTES
from stretto.kernels.collectives.fed_sums import FedSums, fed
from stretto.kernels.collectives.fed_totals import FedTotals
from stretto.kernels.collectives.summing import Piece, Summing, piece_of
from stretto.kernels.collectives.token_sums import added_up
from stretto.kernels.collectives.token_tables import Chunks, Row
from stretto.kernels.problem.routing import NONE

FEWEST_ROWS = 4
"""Of a ring, for which a piece of a row is small enough."""


def combine(
    rows: jax.Array,
    weights: jax.Array,
    positions: jax.Array,
    row: Row,
    chunks: Chunks,
    wire_dtype: Any,
    config: Any,
    interpret: Any,
) -> jax.Array:
    """`[rows, d]`, float32 and int32 `[tokens, top_k]` -> `[tokens, d]`, in the rows' type."""
    team, (tokens, top_k) = chunks.team, positions.shape
    shape = row.parts, row.columns
    operands = (
        rows.reshape(rows.shape[0], *shape),
        chunks.padded(positions, NONE),
        chunks.padded(weights.astype(jnp.float32), 0),
    )
    totals = config.totals and not team.is_alone
    how = _summing(row, top_k, chunks, rows.dtype, wire_dtype, config, totals=totals)
    inbox = jax.ShapeDtypeStruct((team.size, tokens, *shape), wire_dtype)
    options = dict(
        name="expert_combine",
        team=team,
        num_blocks=chunks.num_blocks,
        num_threads=chunks.warpgroups + 1,
        interpret=interpret,
    )
    if not totals:
        options.update(out_type=[inbox], scratch=how.scratch())
        (found,) = kernel.launch(_sums(how), *operands, **options)
        return added_up(found.reshape(team.size, tokens, -1), positions, rows.dtype)
    own = max(1, chunks.warpgroups // team.size)
    roles = (
        (range(1), own, chunks.warpgroups - own),
        (range(1, team.size), chunks.warpgroups - own, 0),
    )
    ours, theirs = (
        dataclasses.replace(
            how,
            chunks=dataclasses.replace(
                chunks, whose=whose, warpgroups=number, first_warpgroup=first
            ),
        )
        for whose, number, first in roles
    )
    memory = {"their_": theirs.scratch(), "own_": fed_totals.scratch(ours)}
    (found,) = kernel.launch(
        _totals(ours, theirs, {role: list(each) for role, each in memory.items()}),
        *operands,
        out_type=[jax.ShapeDtypeStruct((tokens, *shape), rows.dtype)],
        symmetric=[inbox],
        semaphore_arrays=dict(arrived=SemaphoreArray((chunks.number,))),
        scratch={role + x: y for role, each in memory.items() for x, y in each.items()},
        **options,
    )
    return found.reshape(tokens, -1)


def _summing(
    row: Row,
    top_k: int,
    chunks: Chunks,
    dtype: Any,
    wire_dtype: Any,
    config: Any,
    *,
    totals: bool,
) -> Summing:
    """How each warpgroup sums, whose rings fill the shared memory that they have."""
    each = SMEM_BYTES // chunks.warpgroups
    itemsize, wire_size = jnp.dtype(dtype).itemsize, jnp.dtype(wire_dtype).itemsize
    piece: Piece = piece_of(row, itemsize, FEWEST_ROWS // 2, each, peers=totals)
    elements = piece.padded * row.columns
    stages = config.stages if totals else 0
    # Two sums to store, of which the totals have two more; and what peers stored.
    room = each - elements * (2 * wire_size + totals * (2 * itemsize + stages * wire_size))
    if totals and room < FEWEST_ROWS * elements * itemsize:
        stages = 2
        room = each - elements * (2 * wire_size + 2 * itemsize + stages * wire_size)
    return Summing(
        row=row,
        piece=piece,
        top_k=top_k,
        stages=stages,
        chunks=chunks,
        dtype=dtype,
        wire_dtype=wire_dtype,
        ring=max(
            2, min(config.ring, MOST_SLOTS // chunks.warpgroups, room // (elements * itemsize))
        ),
    )


def _sums(how: Summing) -> Any:
    """The kernel's body without the totals."""
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

    return body


def _totals(ours: Summing, theirs: Summing, names: dict[str, Sequence[str]]) -> Any:
    """The kernel's body with the totals; `names` are of each role's memory."""
    others, own = theirs.chunks.warpgroups, ours.chunks.warpgroups

    def body(rows, positions, weights, out, inbox, *, arrived, **scratch):
        refs = dict(rows=rows, positions=positions, weights=weights, inbox=inbox)
        of_role = lambda role: {x: scratch[role + x] for x in names[role]}  # noqa: E731
        mine = refs | dict(scratch=of_role("own_"), out=out, arrived=arrived)
        peers = refs | dict(scratch=of_role("their_"), told=_told(theirs, arrived))
        warpgroup = lax.axis_index(kernel.THREAD_AXIS)
        pl.when(warpgroup < others)(lambda: FedSums.of(theirs, **peers).run())

        @pl.when((warpgroup >= others) & (warpgroup < others + own))
        def _():
            FedTotals.of(ours, **mine).run()

        @pl.when(warpgroup == others + own)
        def _():
            @plgpu.warp_map
            def _(warp):
                pl.when(warp < others)(FedSums.of(fed(theirs, warp), **peers).feed)
                feed = FedTotals.of(fed(ours, warp - others), **mine).feed
                pl.when((warp >= others) & (warp < others + own))(feed)

    return body


def _told(theirs: Summing, arrived: Any) -> Any:
    """Signals the owner of a chunk that its sums are in place."""
    team, chunks = theirs.chunks.team, theirs.chunks

    def tell(n: Any) -> None:
        offset, first = chunks.place(n)
        chunk = schedule.div(first, chunks.tokens)
        for peer in team.peer_offsets:

            @pl.when(offset == peer)
            def _(peer=peer):
                arrived.at[chunk].signal(peer_id=team.neighbour(peer))

    return tell
