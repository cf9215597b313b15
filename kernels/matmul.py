"""`out = epilogue(lhs @ rhs)`: the persistent, warp-specialised Hopper matmul that all kernels share.

A block has three warpgroups. Two multiply: each holds half the rows of a tile in its accumulator.
The third has two busy warps: one loads tiles of lhs and rhs into a ring of `num_stages` slots of
shared memory, the other runs `communicate`, whatever a fused kernel has to move meanwhile.

| barrier | arrives | waits | count | proves |
|---|---|---|---|---|
| `full[stage]` | both copies into the stage | the multiplying warpgroups | 2 | the stage holds a tile |
| `empty[stage]` | the multiplying warpgroups | the loading warp | 2 | the stage may be overwritten |

A fused kernel says where tiles come from and go to with the hooks of `Hooks`, and is otherwise the
plain matmul: it copies none of it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed.kernel import CLUSTER_AXIS, GRID_AXIS, THREAD_AXIS
from stretto.distributed.schedule import ceil_div, share
from stretto.kernels.dispatch import Problem

MULTIPLYING_WARPGROUPS = 2
NUM_WARPGROUPS = MULTIPLYING_WARPGROUPS + 1
SMEM_BYTES = 232_448 - 1024  # of a Hopper block, less what barriers and alignment take
SWIZZLE_BYTES = 128
# Registers of a thread: the file of 65536 is shared by 128 loading and 256 multiplying threads.
LOADING_REGISTERS = 40
MULTIPLYING_REGISTERS = 232


@dataclasses.dataclass(frozen=True, kw_only=True)
class TileConfig:
    """How a matmul is cut up.

    Attributes:
      tile_m, tile_n, tile_k: the tile of one block, in elements; `tile_m` is split between the two
        multiplying warpgroups.
      num_stages: depth of the ring of lhs and rhs tiles.
      raster_width: groups of tiles down a band of the raster (`tiles.raster`).
      cluster_size: 2 for pairs of blocks that work on tiles one above the other and load their
        common columns of rhs once for both, which spares the L2 cache; 1 for blocks on their own.
      store_buffers: buffers of 64 rows x 128 bytes that a multiplying warpgroup stores through;
        with enough for a whole tile, its stores go on while the next tile is multiplied.
    """

    tile_m: int = 128
    tile_n: int = 256
    tile_k: int = 64
    num_stages: int = 4
    raster_width: int = 16
    cluster_size: int = 1
    store_buffers: int = 1

    def check(self) -> None:
        """Raises ValueError for a tile that the tensor cores or the copy engine cannot take."""
        if self.tile_m % (64 * MULTIPLYING_WARPGROUPS):
            raise ValueError(f"tile_m={self.tile_m} must be a multiple of 128.")
        if self.tile_n % 64 or not 64 <= self.tile_n <= 256:
            raise ValueError(f"tile_n={self.tile_n} must be 64, 128, 192 or 256.")
        if self.tile_k != 64:
            raise ValueError(f"tile_k={self.tile_k} must be 64: one row of the 128 byte swizzle.")
        if self.num_stages < 2:
            raise ValueError(f"num_stages={self.num_stages} must be at least 2.")
        if self.cluster_size not in (1, 2):
            raise ValueError(f"cluster_size={self.cluster_size} must be 1 or 2.")
        if self.tile_m * self.tile_n > 128 * 256:
            raise ValueError(
                f"a tile of {self.tile_m} x {self.tile_n} needs more registers than two"
                " warpgroups have; at most 128 x 256."
            )

    def smem_bytes(self, itemsize: int) -> int:
        """Shared memory of the ring and of the epilogue's buffers, in bytes."""
        ring = self.num_stages * (self.tile_m + self.tile_n) * self.tile_k * itemsize
        return ring + MULTIPLYING_WARPGROUPS * self.store_buffers * 64 * SWIZZLE_BYTES


def unsupported(problem: Problem) -> str | None:
    """Why the matmul cannot serve `problem`, or None if it can."""
    if problem.dtype not in ("bfloat16", "float16"):
        return f"the kernel takes bfloat16 and float16, not {problem.dtype}."
    if problem.out_dtype not in ("bfloat16", "float16", "float32"):
        return f"the kernel stores bfloat16, float16 and float32, not {problem.out_dtype}."
    if 0 in (problem.m, problem.k, problem.n):
        return "an operand is empty."
    return None


def swizzled(dtype: jax.typing.DTypeLike) -> tuple[Any, ...]:
    """Layout of a shared memory tile whose rows are 128 bytes: what wgmma and the engine want."""
    row = SWIZZLE_BYTES // jnp.dtype(dtype).itemsize
    return plgpu.TilingTransform((8, row)), plgpu.SwizzleTransform(SWIZZLE_BYTES)


def scratch(config: TileConfig, dtype: Any, out_dtype: Any) -> dict[str, Any]:
    """Shared memory and barriers of the matmul, by name, for `kernel.launch`."""
    stages = config.num_stages
    out_columns = SWIZZLE_BYTES // jnp.dtype(out_dtype).itemsize
    return dict(
        lhs_smem=plgpu.SMEM(
            (stages, config.tile_m, config.tile_k), dtype, transforms=swizzled(dtype)
        ),
        rhs_smem=plgpu.SMEM(
            (stages, config.tile_k, config.tile_n), dtype, transforms=swizzled(dtype)
        ),
        out_smem=plgpu.SMEM(
            (MULTIPLYING_WARPGROUPS, config.store_buffers, 64, out_columns),
            out_dtype,
            transforms=swizzled(out_dtype),
        ),
        full=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        empty=_empty_barrier(config),
    )


def _empty_barrier(config: TileConfig) -> Any:
    """Neighbours in a cluster write each other's slots, so a slot is free once both have read."""
    kind = plgpu.Barrier
    if config.cluster_size > 1:
        kind = functools.partial(plgpu.ClusterBarrier, collective_axes=(CLUSTER_AXIS,))
    return kind(num_arrivals=MULTIPLYING_WARPGROUPS, num_barriers=config.num_stages)


def copy_rhs(window: Any, slot: Any, barrier: Any, config: TileConfig) -> None:
    """Loads a tile of rhs, for both blocks of a cluster at once."""
    axes = CLUSTER_AXIS if config.cluster_size > 1 else None
    plgpu.copy_gmem_to_smem(window, slot, barrier, collective_axes=axes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hooks:
    """What a kernel makes of the matmul. A `tile` is whatever `locate` returns.

    Attributes:
      locate: index of a group of tiles, in the order of work -> this block's tile of it.
      load_lhs, load_rhs: called in the loading warp with (tile, index along k, slot of shared
        memory, barrier); starts the copy that fills the slot and arrives at the barrier.
      finish: called in each multiplying warpgroup with (tile, its float32 part of the product,
        its buffers of shared memory, first row of its part); stores the part (`store`).
      settle: called in each multiplying warpgroup, before `finish` of its next tile, with (tile,
        warpgroup); for what must follow when the stores are complete, such as a signal.
      communicate: runs in a warp of its own, beside everything else; returns when it is done.
    """

    locate: Callable[[jax.Array], Any]
    load_lhs: Callable[..., None]
    load_rhs: Callable[..., None]
    finish: Callable[..., None]
    settle: Callable[..., None] | None = None
    communicate: Callable[[], None] | None = None


def locate_in(order: Any) -> Callable[[jax.Array], Any]:
    """`Hooks.locate` for an order of tiles with a `locate(group, rank)`."""
    if order.config.cluster_size == 1:
        return order.locate
    return lambda group: order.locate(group, lax.axis_index(CLUSTER_AXIS))


def run(
    hooks: Hooks,
    config: TileConfig,
    *,
    num_groups: int,
    k: int,
    num_blocks: int,
    lhs_smem: Any,
    rhs_smem: Any,
    out_smem: Any,
    full: Any,
    empty: Any,
) -> None:
    """The body of a matmul kernel: every warpgroup of every block calls it once.

    Args:
      hooks: what this kernel makes of it.
      config: the tiles.
      num_groups: groups of `cluster_size` tiles, of the whole device; cluster `c` takes groups
        `c`, `c + clusters`, ...
      k: length of the contraction.
      num_blocks: blocks of the grid.
      lhs_smem, rhs_smem, out_smem, full, empty: from `scratch`.
    """
    k_tiles = ceil_div(k, config.tile_k)
    clusters = num_blocks // config.cluster_size
    warpgroup = lax.axis_index(THREAD_AXIS)
    own_tiles = share(num_groups, lax.axis_index(GRID_AXIS), clusters)

    @pl.when(warpgroup < MULTIPLYING_WARPGROUPS)
    def _():
        plgpu.set_max_registers(MULTIPLYING_REGISTERS, action="increase")
        _multiply(
            hooks, config, own_tiles, clusters, k_tiles, lhs_smem, rhs_smem, out_smem, full, empty
        )

    @pl.when(warpgroup == MULTIPLYING_WARPGROUPS)
    def _():
        plgpu.set_max_registers(LOADING_REGISTERS, action="decrease")

        @plgpu.warp_map
        def _(warp):
            @pl.when(warp == 0)
            def _():
                _load(hooks, config, own_tiles, clusters, k_tiles, lhs_smem, rhs_smem, full, empty)

            if hooks.communicate is not None:

                @pl.when(warp == 1)
                def _():
                    hooks.communicate()


def _load(hooks, config, own_tiles, clusters, k_tiles, lhs_smem, rhs_smem, full, empty):
    """The loading warp: fills the ring, tile after tile, as slots come free."""
    cluster = lax.axis_index(GRID_AXIS)

    def tile_loop(i, stage):
        tile = hooks.locate(cluster + i * clusters)

        def k_loop(k_index, stage):
            plgpu.barrier_wait(empty.at[stage])
            hooks.load_lhs(tile, k_index, lhs_smem.at[stage], full.at[stage])
            hooks.load_rhs(tile, k_index, rhs_smem.at[stage], full.at[stage])
            return _next(stage, config.num_stages)

        return lax.fori_loop(0, k_tiles, k_loop, stage)

    lax.fori_loop(0, own_tiles, tile_loop, jnp.int32(0))

    # A neighbour's last arrivals must find this block still there.
    if config.cluster_size > 1:
        for stage in range(config.num_stages):
            plgpu.barrier_wait(empty.at[stage])


def _multiply(
    hooks, config, own_tiles, clusters, k_tiles, lhs_smem, rhs_smem, out_smem, full, empty
):
    """A multiplying warpgroup: half the rows of each tile, then what `finish` makes of them."""
    cluster = lax.axis_index(GRID_AXIS)
    warpgroup = lax.axis_index(THREAD_AXIS)
    rows = config.tile_m // MULTIPLYING_WARPGROUPS
    for stage in range(config.num_stages):
        plgpu.barrier_arrive(empty.at[stage])  # The whole ring is free at the start.

    def settle(i):
        if hooks.settle is not None:
            plgpu.wait_smem_to_gmem(0, wait_read_only=False)
            hooks.settle(hooks.locate(cluster + i * clusters), warpgroup)

    def tile_loop(i, stage):
        def product_and_stage(acc):
            def k_loop(k_index, stage):
                plgpu.barrier_wait(full.at[stage])
                plgpu.wgmma(
                    acc, lhs_smem.at[stage, pl.ds(warpgroup * rows, rows)], rhs_smem.at[stage]
                )

                plgpu.wgmma_wait(1)

                # All but the newest product is done: the slot before this one may be refilled.
                @pl.when(k_index > 0)
                def _():
                    plgpu.barrier_arrive(empty.at[_previous(stage, config.num_stages)])

                return _next(stage, config.num_stages)

            stage_after = lax.fori_loop(0, k_tiles, k_loop, stage)
            return acc[...], stage_after

        product, stage = pl.run_scoped(
            product_and_stage, plgpu.ACC((rows, config.tile_n), jnp.float32)
        )
        plgpu.barrier_arrive(empty.at[_previous(stage, config.num_stages)])

        @pl.when(i > 0)
        def _():
            settle(i - 1)

        hooks.finish(
            hooks.locate(cluster + i * clusters),
            product,
            out_smem.at[warpgroup],
            warpgroup * rows,
        )
        return stage

    lax.fori_loop(0, own_tiles, tile_loop, jnp.int32(0))
    plgpu.wait_smem_to_gmem(0, wait_read_only=False)

    @pl.when(own_tiles > 0)
    def _():
        settle(own_tiles - 1)


def store(
    product: jax.Array,
    buffers: Any,
    windows: Callable[[int, int, int, int], Sequence[Any]],
    epilogue: Callable[[jax.Array, int, int], jax.Array] | None = None,
) -> None:
    """Stores a warpgroup's part of a tile through its buffers, a piece at a time.

    Args:
      product: float32 `[rows, columns]`.
      buffers: shared memory of the result's type, `[store_buffers, 64, 128 bytes]`.
      windows: (first row, rows, first column, columns), relative to the part -> the views of global
        memory, here or on peers, where that piece of the result goes.
      epilogue: (piece, first row, first column) -> what is stored in its place.
    """
    rows, columns = product.shape
    count, piece_rows, piece_columns = buffers.shape
    corners = itertools.product(range(0, rows, piece_rows), range(0, columns, piece_columns))
    for number, (row, column) in enumerate(corners):
        piece = product[row : row + piece_rows, column : column + piece_columns]
        if epilogue is not None:
            piece = epilogue(piece, row, column)
        buffer = buffers.at[number % count]
        plgpu.wait_smem_to_gmem(count - 1, wait_read_only=True)  # This buffer has been read.
        buffer[...] = piece.astype(buffer.dtype)
        plgpu.commit_smem()
        for window in windows(row, piece_rows, column, piece_columns):
            plgpu.copy_smem_to_gmem(buffer, window, commit_group=False)
        plgpu.commit_smem_to_gmem_group()


def _next(stage, num_stages):
    following = stage + 1
    return lax.select(following == num_stages, jnp.int32(0), following)


def _previous(stage, num_stages):
    return lax.select(stage == 0, jnp.int32(num_stages - 1), stage - 1)
