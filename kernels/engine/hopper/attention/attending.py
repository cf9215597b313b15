"""The attending warpgroups: each makes the result of 64 queries of a tile.

The tensor cores are one warpgroup's at a time (`turn`), for its product of weights and values and
its next product of queries and keys. Meanwhile the others turn scores into weights. A warpgroup's
own products do not run beside its softmax: with two of them under way the assembler serialises
both, because registers of the second are set after the first has started (ptxas, C7513).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed.kernel import THREAD_AXIS
from stretto.distributed.schedule import Int, rem
from stretto.kernels.engine.attention.documents import Documents
from stretto.kernels.engine.attention.parts import AttentionParts
from stretto.kernels.engine.attention.visible import VisibleKeys
from stretto.kernels.engine.block import Block
from stretto.kernels.engine.hopper.attention import softmax
from stretto.kernels.engine.hopper.attention.config import ROWS
from stretto.kernels.engine.hopper.attention.memory import Memory
from stretto.kernels.engine.hopper.attention.softmax import Folded
from stretto.kernels.engine.parts import Ref, Tile


def attend(block: Block, parts: AttentionParts, memory: Memory) -> None:
    """Attends with its rows of one tile after another, and hands the results over."""
    own = lax.axis_index(THREAD_AXIS)  # Read once: the loops below would shuffle for it each time.
    plgpu.barrier_arrive(memory.queries.empty.at[own])  # All memory is free at the start.
    for stage in range(memory.num_stages):
        plgpu.barrier_arrive(memory.keys.empty.at[stage])
        plgpu.barrier_arrive(memory.values.empty.at[stage])
    # The first turn is the first warpgroup's.
    pl.when(own == memory.warpgroups - 1)(lambda: plgpu.barrier_arrive(memory.turn.at[0]))

    def make_tile(_: Int, tile: Tile, stage: jax.Array) -> jax.Array:
        folded, stage = _fold_all(parts, memory, own, tile, stage)
        _hand_over(memory, folded)
        return stage

    block.for_each_tile(make_tile, jnp.int32(0))


def _fold_all(
    parts: AttentionParts, memory: Memory, own: jax.Array, tile: Tile, stage: jax.Array
) -> tuple[Folded, jax.Array]:
    """Attention to all keys that the tile sees, and the next stage."""
    visible = parts.visible
    first_of_tile = parts.first_query(tile)
    first_query, count = first_of_tile + own * ROWS, parts.seen.count(tile)

    def of_segment(segment: jax.Array, carry: tuple) -> tuple:
        first, last = parts.seen.blocks(tile, segment)
        first_key = visible.first_key(segment)
        by_documents = _mask_of_documents(parts.documents, tile, own, segment)

        def of_block(place: jax.Array, carry: tuple) -> tuple:
            folded, stage, left = carry
            is_last = left == 1
            scores = _scores(memory, own, stage, is_last=is_last)
            scores = _masked(visible, scores, first_query, first_key + place * visible.block)
            scores = by_documents(scores, place)
            dtype = memory.values.smem.dtype
            weights, folded = softmax.weighed(scores, folded, parts.exponent, dtype)
            out = _with_values(memory, own, stage, weights, folded.out, is_last=is_last)
            return folded._replace(out=out), memory.next(stage), left - 1

        return lax.fori_loop(first, last, of_block, carry)

    # This warpgroup's rows of the tile are there.
    plgpu.barrier_wait(memory.queries.full.at[own])
    _wait_for_keys(memory, stage)
    # The warpgroup before has started its products.
    plgpu.barrier_wait(memory.turn.at[own])
    start = softmax.nothing(ROWS, memory.values.smem.shape[2]), stage, jnp.int32(count)
    with jax.named_scope("attend"):
        folded, stage, _ = lax.fori_loop(0, visible.segments, of_segment, start)
    _pass_turn(memory, own)
    return folded, stage


def _masked(
    visible: VisibleKeys, scores: jax.Array, first_query: jax.Array, first_key: Int
) -> jax.Array:
    """Scores of a block of keys, with a mask where one is needed."""
    if not visible.causal:
        return scores
    return lax.cond(
        visible.needs_mask(first_query, ROWS, first_key),
        lambda scores: softmax.masked(scores, first_query - first_key, visible.window),
        lambda scores: scores,
        scores,
    )


def _mask_of_documents(
    documents: Documents | None, tile: Tile, own: jax.Array, segment: jax.Array
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """(scores, block of the segment) -> scores, with a mask where the block has other documents."""
    if documents is None:
        return lambda scores, place: scores
    first, last = documents.plain_blocks(tile, segment)
    begin = segment * documents.visible.blocks_of_chunk

    def masked(scores: jax.Array, place: jax.Array) -> jax.Array:
        return lax.cond(
            (first <= place) & (place < last),
            lambda scores: scores,
            lambda scores: documents.masked(scores, tile, own * ROWS, begin + place),
            scores,
        )

    return masked


def _wait_for_keys(memory: Memory, stage: jax.Array) -> None:
    """Returns once the copy of a block of keys is complete."""
    plgpu.barrier_wait(memory.keys.full.at[stage])


def _scores(memory: Memory, own: jax.Array, stage: jax.Array, *, is_last: jax.Array) -> jax.Array:
    """Products of the queries and a block of keys; then the turn is the next warpgroup's.

    Of the tile's last block they release the queries, so that the next tile's are loaded meanwhile.
    """

    def multiply(acc: Ref) -> jax.Array:
        keys = memory.keys.smem.at[stage].transpose((1, 0))
        plgpu.wgmma(acc, memory.queries.smem.at[own], keys)
        _pass_turn(memory, own)
        return acc[...]  # Reading it waits for the product.

    shape = ROWS, memory.keys.smem.shape[1]
    scores = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))
    # Publishes to the loading warp that this warpgroup's product has read the keys.
    plgpu.barrier_arrive(memory.keys.empty.at[stage])

    @pl.when(is_last)
    def _():
        # Publishes to the loading warp that all products have read the queries.
        plgpu.barrier_arrive(memory.queries.empty.at[own])

    return scores


def _with_values(
    memory: Memory,
    own: jax.Array,
    stage: jax.Array,
    weights: jax.Array,
    out: jax.Array,
    *,
    is_last: jax.Array,
) -> jax.Array:
    """`out` plus weighted values, in its turn; waits for the next block of keys meanwhile."""

    def wait() -> None:
        # The copy of the block is complete.
        plgpu.barrier_wait(memory.values.full.at[stage])
        # The warpgroup before has started its products.
        plgpu.barrier_wait(memory.turn.at[own])

    def multiply(acc: Ref) -> None:
        wait()
        plgpu.wgmma(acc, weights, memory.values.smem.at[stage])
        pl.when(~is_last)(lambda: _wait_for_keys(memory, memory.next(stage)))

    total: Any = pl.run_state(multiply)(plgpu.WGMMAAccumulatorRef.init(out))
    # Publishes to the loading warp that this warpgroup's product has read the values.
    plgpu.barrier_arrive(memory.values.empty.at[stage])
    return total


def _pass_turn(memory: Memory, own: jax.Array) -> None:
    """Publishes to the next warpgroup that this one has started its products."""
    following = rem(own + 1, memory.warpgroups)
    plgpu.barrier_arrive(memory.turn.at[following])


def _hand_over(memory: Memory, folded: Folded) -> None:
    """Puts the result and its logsumexp where the storing warp takes them from."""
    own = lax.axis_index(THREAD_AXIS)  # Read again: no address of a store is kept in the loop.
    out, lse = softmax.finished(folded)
    # The stores of the last tile's result have read the buffers.
    plgpu.barrier_wait(memory.free.at[own])
    memory.out.at[own][...] = out.astype(memory.out.dtype)
    memory.lse.at[own][...] = lse
    plgpu.commit_smem()
    # Publishes both to the storing warp.
    plgpu.barrier_arrive(memory.filled.at[own])
