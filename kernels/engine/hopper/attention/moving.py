"""The loading warp and the storing warp of attention."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed.schedule import Int
from stretto.kernels.engine.attention.parts import AttentionParts
from stretto.kernels.engine.block import Block
from stretto.kernels.engine.gates import Gates
from stretto.kernels.engine.hopper.attention.config import ROWS
from stretto.kernels.engine.hopper.attention.memory import Memory
from stretto.kernels.engine.parts import Tile


def load(block: Block, parts: AttentionParts, gates: Gates | None, memory: Memory) -> None:
    """Loads queries, keys and values of one tile after another, as they arrive and find room."""
    if gates is not None:
        gates.free_slots()
    visible = parts.visible

    def load_block(tile: Tile, place: Int, stage: jax.Array) -> jax.Array:
        # The products have read what the stage held.
        plgpu.barrier_wait(memory.keys.empty.at[stage])
        # Each copy, once complete, publishes its block to the warpgroups that attend.
        parts.lhs.load(tile, place, memory.keys.smem.at[stage], memory.keys.full.at[stage])
        plgpu.barrier_wait(memory.values.empty.at[stage])
        parts.rhs.load(tile, place, memory.values.smem.at[stage], memory.values.full.at[stage])
        return memory.next(stage)

    def load_tile(i: Int, tile: Tile, stage: jax.Array) -> jax.Array:
        queries = memory.queries
        for index in range(memory.warpgroups):
            # The products have read the queries of the tile before.
            plgpu.barrier_wait(queries.empty.at[index])
            parts.queries(tile, index * ROWS, ROWS, queries.smem.at[index], queries.full.at[index])

        def load_segment(segment: jax.Array, stage: jax.Array) -> jax.Array:
            if gates is not None:
                gates.go_through(i, segment)
            first, last = parts.seen.blocks(tile, segment)
            begin = segment * visible.blocks_of_chunk
            return lax.fori_loop(
                first, last, lambda place, stage: load_block(tile, begin + place, stage), stage
            )

        with jax.named_scope("load"):
            return lax.fori_loop(0, visible.segments, load_segment, stage)

    block.for_each_tile(load_tile, jnp.int32(0))


def store(block: Block, parts: AttentionParts, memory: Memory) -> None:
    """Stores the results of one tile after another."""
    for index in range(memory.warpgroups):
        plgpu.barrier_arrive(memory.free.at[index])  # All buffers are free at the start.
    block.before_stores()

    def store_tile(_: Int, tile: Tile, carry: None) -> None:
        with jax.named_scope("store"):
            for index in range(memory.warpgroups):
                # The warpgroup has filled its buffers.
                plgpu.barrier_wait(memory.filled.at[index])
                parts.sink.store(tile, memory.out.at[index], index * ROWS, 0)
                parts.store_logsumexp(tile, memory.lse.at[index], index * ROWS)
                plgpu.commit_smem_to_gmem_group()
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            for index in range(memory.warpgroups):
                # Publishes to the warpgroup that the stores have read its buffers.
                plgpu.barrier_arrive(memory.free.at[index])

    block.for_each_tile(store_tile, None)
    plgpu.wait_smem_to_gmem(0, wait_read_only=False)
