"""The deriving warpgroups: each makes the derivatives of 64 keys and values of a block.

With weights `P = exp(scale * S - logsumexp)` of scores `S`, and *slopes* `dS = P * (dP - delta)`,
where `dP` are products of the result's derivatives and values and `delta` is, by row, the sum of
the result times its derivative: values get `P^T dO`, keys `scale * dS^T Q`, queries `scale * dS K`.

A warpgroup multiplies twice for each tile of queries. First `S^T` and `dP^T`, whose accumulators
start with the negative logsumexps and deltas, so that weights and slopes are one more product each.
Then the sums for values and keys, from registers, and its piece of what the tile *before* gets:
that takes the slopes of both warpgroups, through shared memory, and these are ready by then.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed.kernel import THREAD_AXIS
from stretto.distributed.schedule import Int
from stretto.kernels.engine.attention.derivative_parts import DerivativeParts, Queries
from stretto.kernels.engine.block import Block
from stretto.kernels.engine.hopper.attention.config import ROWS
from stretto.kernels.engine.hopper.attention.derivative_config import PIECE, SLOTS, STAGES
from stretto.kernels.engine.hopper.attention.derivative_memory import Memory
from stretto.kernels.engine.parts import Ref, Tile

WGMMA = plgpu.Layout.WGMMA


class Sums(NamedTuple):
    """What the keys of a warpgroup got so far, float32 `[64, dim]` each, and where it is.

    Attributes:
      keys, values: their derivatives; those of keys without the scale.
      stage, slot: of the next tile of queries, and of its slopes.
      begun: whether there was one.
    """

    keys: jax.Array
    values: jax.Array
    stage: jax.Array
    slot: jax.Array
    begun: jax.Array


def derive(block: Block, parts: DerivativeParts, memory: Memory, *, turns: bool) -> None:
    """Derives one block of keys after another; `turns` is `DerivativeTiles.turns`."""
    own = _own()
    for stage in range(STAGES):
        plgpu.barrier_arrive(memory.queries_empty.at[stage])  # All memory is free at the start.
    if parts.clear is not None:
        memory.sums.at[own][...] = _no_piece()
        plgpu.commit_smem()
        # Publishes zeros to the adding warp.
        plgpu.barrier_arrive(memory.filled.at[own])
    last = SLOTS - 1
    for row in range(memory.rows):  # The slopes before the first ones.
        nothing = jnp.zeros((ROWS, PIECE), memory.slopes.dtype)
        memory.slopes.at[last, row, own][...] = plgpu.layout_cast(nothing, WGMMA)
    _share_slopes(memory, last)
    # The first turn is the first warpgroup's.
    if turns:
        pl.when(own == 1)(lambda: plgpu.barrier_arrive(memory.turn.at[0]))

    def derive_tile(
        _: Int, tile: Tile, place: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        zeros = plgpu.layout_cast(jnp.zeros((ROWS, memory.values.shape[2]), jnp.float32), WGMMA)
        start = Sums(zeros, zeros, *place, jnp.bool_(False))
        # The copies of the block's keys and values are complete.
        plgpu.barrier_wait(memory.keys_full)

        def step(queries: Queries, sums: Sums) -> Sums:
            own = _own()
            return _of_queries(parts, memory, own, tile, queries, sums, turns=turns)

        with jax.named_scope("derive"):
            sums = parts.for_each_tile_of_queries(tile, step, start)
        _last_piece(memory, _own(), sums)
        _hand_over(memory, _own(), sums, parts.scale)
        return sums.stage, sums.slot

    block.for_each_tile(derive_tile, (jnp.int32(0), jnp.int32(0)))


def _own() -> jax.Array:
    """This warpgroup; read where it is used, or what follows from it would take registers."""
    return lax.axis_index(THREAD_AXIS)


def _of_queries(
    parts: DerivativeParts,
    memory: Memory,
    own: jax.Array,
    tile: Tile,
    queries: Queries,
    sums: Sums,
    *,
    turns: bool,
) -> Sums:
    """What a tile of queries adds."""
    stage, slot = sums.stage, sums.slot
    # The copies of the tile are complete.
    plgpu.barrier_wait(memory.queries_full.at[stage])
    scores, bars = _products(memory, own, stage, turns=turns)
    first_key = parts.first_key(tile) + own * ROWS
    scores = _masked(parts, scores, parts.first_query(queries) - first_key)
    scores = _of_own_documents(parts, scores, tile, own, queries)
    weights = jnp.exp2(scores * parts.exponent)
    slopes = (weights * bars).astype(memory.slopes.dtype)
    weights = weights.astype(memory.slopes.dtype)
    for row in range(memory.rows):
        piece = slopes[:, row * PIECE : (row + 1) * PIECE]
        memory.slopes.at[slot, row, own][...] = piece
    _share_slopes(memory, slot)
    keys, values, piece = _add_up(memory, own, sums, weights, slopes, turns=turns)
    # Publishes to the loading warp that this warpgroup's products have read the tile.
    plgpu.barrier_arrive(memory.queries_empty.at[stage])
    pl.when(sums.begun)(lambda: _hand_piece_over(memory, own, piece))
    return Sums(keys, values, 1 - stage, _after(slot), jnp.bool_(True))


def _after(slot: jax.Array) -> jax.Array:
    return lax.select(slot == SLOTS - 1, jnp.int32(0), slot + 1)


def _before(slot: jax.Array) -> jax.Array:
    return lax.select(slot == 0, jnp.int32(SLOTS - 1), slot - 1)


def _products(
    memory: Memory, own: jax.Array, stage: jax.Array, *, turns: bool
) -> tuple[jax.Array, jax.Array]:
    """`[64, queries]`: scores less logsumexps, products of values and derivatives less deltas."""
    by_column = WGMMA.reduce(0)
    shape = ROWS, memory.queries.shape[1]

    def start(ref: Ref) -> jax.Array:
        row = plgpu.load(ref.at[stage], layout=by_column)
        return lax.broadcast_in_dim(row, shape, (1,))

    def multiply(refs: tuple[Ref, Ref]) -> None:
        scores, bars = refs
        _wait_for_turn(memory, own, turns)
        for column in range(memory.columns):
            queries = memory.queries.at[stage, :, pl.ds(column * PIECE, PIECE)].transpose((1, 0))
            plgpu.wgmma(scores, memory.keys.at[own, column], queries)
        plgpu.wgmma(bars, memory.values.at[own], memory.bars.at[stage].transpose((1, 0)))
        _pass_turn(memory, own, turns)

    init = plgpu.WGMMAAccumulatorRef.init
    found: Any = pl.run_state(multiply)((init(start(memory.lse)), init(start(memory.delta))))
    return found


def _masked(parts: DerivativeParts, scores: jax.Array, ahead: Int) -> jax.Array:
    """Minus infinity where a query does not see a key.

    The first query is `ahead` places behind the first key in the sequence.
    """
    visible = parts.seeing.visible
    if not visible.causal:
        return scores
    keys, queries = scores.shape
    needed = ahead < keys - 1
    if visible.window is not None:
        needed |= ahead + queries - 1 >= visible.window

    def masked(scores: jax.Array) -> jax.Array:
        columns = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=WGMMA)
        # Limits by row take two registers of a thread; distances of all pairs would take more.
        own = plgpu.broadcasted_iota(jnp.int32, scores.shape[:1], 0, layout=WGMMA.reduce(1)) - ahead
        within, before = columns & 7, columns & ~7
        seen = within >= lax.broadcast_in_dim(own, scores.shape, (0,)) - before
        if visible.window is not None:
            last = own + visible.window
            seen &= within < lax.broadcast_in_dim(last, scores.shape, (0,)) - before
        return jnp.where(seen, scores, -jnp.inf)

    return lax.cond(needed, masked, lambda scores: scores, scores)


def _of_own_documents(
    parts: DerivativeParts, scores: jax.Array, tile: Tile, own: jax.Array, queries: Queries
) -> jax.Array:
    """Minus infinity where a query and a key are of different documents."""
    documents = parts.documents
    if documents is None or queries.is_plain is None:
        return scores
    return lax.cond(
        queries.is_plain,
        lambda scores: scores,
        lambda scores: documents.masked(scores, tile, own * ROWS, queries.chunk, queries.tile),
        scores,
    )


def _add_up(
    memory: Memory,
    own: jax.Array,
    sums: Sums,
    weights: jax.Array,
    slopes: jax.Array,
    *,
    turns: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(sums for keys, for values, the piece for the tile of queries before)."""
    stage = sums.stage

    def multiply(refs: tuple[Ref, Ref, Ref]) -> None:
        keys, values, piece = refs
        _wait_for_turn(memory, own, turns)
        plgpu.wgmma(values, weights, memory.bars.at[stage])
        plgpu.wgmma(keys, slopes, memory.queries.at[stage])
        _multiply_slopes(memory, own, piece, _before(sums.slot))
        _pass_turn(memory, own, turns)

    init = plgpu.WGMMAAccumulatorRef.init
    start = init(sums.keys), init(sums.values), init(_no_piece())
    found: Any = pl.run_state(multiply)(start)
    return found


def _no_piece() -> jax.Array:
    return plgpu.layout_cast(jnp.zeros((PIECE, PIECE), jnp.float32), WGMMA)


def _multiply_slopes(memory: Memory, own: jax.Array, piece: Ref, slot: jax.Array) -> None:
    """Starts the products of slopes and keys: rows of this warpgroup, or columns."""
    # Both warpgroups have written their slopes.
    plgpu.barrier_wait(memory.slopes_full.at[slot])
    row, column = (own, 0) if memory.rows > 1 else (0, own)
    for keys in range(2):
        slopes = memory.slopes.at[slot, row, keys].transpose((1, 0))
        plgpu.wgmma(piece, slopes, memory.keys.at[keys, column])


def _share_slopes(memory: Memory, slot: Int) -> None:
    """Publishes to both warpgroups that this one has written its slopes."""
    plgpu.commit_smem()
    plgpu.barrier_arrive(memory.slopes_full.at[slot])


def _last_piece(memory: Memory, own: jax.Array, sums: Sums) -> None:
    """Hands over the piece for the last tile of queries, if there was one.

    It returns once neither warpgroup needs the block of keys any more.
    """
    before = _before(sums.slot)

    def multiply(piece: Ref) -> None:
        _multiply_slopes(memory, own, piece, before)

    piece: Any = pl.run_state(multiply)(plgpu.WGMMAAccumulatorRef.init(_no_piece()))
    # Both warpgroups' products have read the block.
    plgpu.barrier_arrive(memory.slopes_full.at[before])
    plgpu.barrier_wait(memory.slopes_full.at[before])
    # Once more, for the next block's first wait.
    plgpu.barrier_arrive(memory.slopes_full.at[before])
    pl.when(sums.begun)(lambda: _hand_piece_over(memory, own, piece))


def _hand_piece_over(memory: Memory, own: jax.Array, piece: jax.Array) -> None:
    """Puts a piece for queries where the adding warp takes it from."""
    # The copy of the last one has read the buffer.
    plgpu.barrier_wait(memory.free.at[own])
    memory.sums.at[own][...] = piece
    plgpu.commit_smem()
    # Publishes it to the adding warp.
    plgpu.barrier_arrive(memory.filled.at[own])


def _hand_over(memory: Memory, own: jax.Array, sums: Sums, scale: float) -> None:
    """Puts the block's derivatives in place of its keys and values."""
    dtype = memory.values.dtype
    memory.values.at[own][...] = sums.values.astype(dtype)
    keys = (sums.keys * scale).astype(dtype)
    for column in range(memory.columns):
        piece = keys[:, column * PIECE : (column + 1) * PIECE]
        memory.keys.at[own, column][...] = piece
    plgpu.commit_smem()
    # Publishes both to the loading warp.
    plgpu.barrier_arrive(memory.keys_done)


def _wait_for_turn(memory: Memory, own: jax.Array, turns: bool) -> None:
    """Returns once the other warpgroup has started its products."""
    if turns:
        plgpu.barrier_wait(memory.turn.at[own])


def _pass_turn(memory: Memory, own: jax.Array, turns: bool) -> None:
    """Publishes to the other warpgroup that this one has started its products."""
    if turns:
        plgpu.barrier_arrive(memory.turn.at[1 - own])
