"""The loading warp and the adding warp of attention's derivative."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed.schedule import Int
from stretto.kernels.engine.attention.derivative_parts import DerivativeParts, Queries
from stretto.kernels.engine.block import Block
from stretto.kernels.engine.hopper.attention.derivative_config import WARPGROUPS
from stretto.kernels.engine.hopper.attention.derivative_memory import Memory
from stretto.kernels.engine.parts import Tile


def load(block: Block, parts: DerivativeParts, memory: Memory) -> None:
    """Loads blocks of keys and the queries that see them, and stores the blocks' derivatives."""
    block.before_stores()

    def store(tile: Tile) -> None:
        # Both warpgroups have put the derivatives in place of keys and values.
        plgpu.barrier_wait(memory.keys_done)
        parts.store_keys(tile, memory.keys, memory.values)
        plgpu.commit_smem_to_gmem_group()
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def load_queries(tile: Tile, queries: Queries, stage: jax.Array) -> jax.Array:
        # The products have read what the stage held.
        plgpu.barrier_wait(memory.queries_empty.at[stage])
        rows = memory.lse.at[stage], memory.delta.at[stage]
        into = memory.queries.at[stage], memory.bars.at[stage], *rows
        parts.load_queries(tile, queries, into, memory.queries_full.at[stage])
        return 1 - stage

    def load_tile(i: Int, tile: Tile, stage: jax.Array) -> jax.Array:
        parts.load_keys(tile, memory.keys, memory.values, memory.keys_full)
        with jax.named_scope("load"):
            stage = parts.for_each_tile_of_queries(
                tile, lambda queries, stage: load_queries(tile, queries, stage), stage
            )
        store(tile)
        return stage

    block.for_each_tile(load_tile, jnp.int32(0))
    plgpu.wait_smem_to_gmem(0, wait_read_only=False)
    if parts.stored_keys is not None:
        parts.stored_keys()


def add(block: Block, parts: DerivativeParts, memory: Memory) -> None:
    """Adds what blocks of keys give to the derivative of queries."""
    if parts.clear is not None:
        for index in range(WARPGROUPS):
            # The warpgroup has filled its buffer with zeros.
            plgpu.barrier_wait(memory.filled.at[index])
        parts.clear(memory.sums)
    for index in range(WARPGROUPS):
        plgpu.barrier_arrive(memory.free.at[index])  # All buffers are free at the start.

    def add_tile(tile: Tile, queries: Queries) -> None:
        if parts.clear is None:
            parts.wait_for_turn(tile, queries)
        for index in range(WARPGROUPS):
            # The warpgroup has filled its buffer.
            plgpu.barrier_wait(memory.filled.at[index])
            parts.add_queries(tile, queries, index, memory.sums.at[index])
            plgpu.commit_smem_to_gmem_group()
        for index in range(WARPGROUPS):
            plgpu.wait_smem_to_gmem(WARPGROUPS - 1 - index, wait_read_only=True)
            # Publishes to the warpgroup that the copy has read its buffer.
            plgpu.barrier_arrive(memory.free.at[index])
        if parts.clear is None:
            plgpu.wait_smem_to_gmem(0, wait_read_only=False)
            parts.added(tile, queries)

    def of_tile(_: Int, tile: Tile, carry: None) -> None:
        with jax.named_scope("add"):
            parts.for_each_tile_of_queries(tile, lambda queries, _: add_tile(tile, queries), None)

    block.for_each_tile(of_tile, None)
    plgpu.wait_smem_to_gmem(0, wait_read_only=False)
