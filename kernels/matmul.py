"""`lhs @ rhs`: the persistent, warp-specialised Hopper matmul that all kernels share.

A block has three warpgroups. Two multiply: each holds half the rows of a tile in its accumulator.
The third has up to three busy warps: one loads tiles of lhs and rhs into a ring of `num_stages`
slots of shared memory, one runs `communicate`, whatever a fused kernel has to move meanwhile, and
one looks out for what has yet to arrive. Neither the loading warp nor the multiplying warpgroups
wait for a semaphore themselves: a look at global memory takes longer than the ring holds out, and
where warpgroups wait so, the assembler serialises the tensor cores (ptxas, C7520).

| barrier | arrives | waits | count | proves |
|---|---|---|---|---|
| `full[stage]` | both copies into it | multiplying warpgroups | 2 | the stage holds a tile |
| `empty[stage]` | multiplying warpgroups | loading warp | 2 | it may be overwritten |
| `opened[slot]` | looking-out warp | loading warp | 1 | the next columns of lhs are in place |
| `passed[slot]` | loading warp | looking-out warp | 1 | the slot may be used again |
| `cleared` | looking-out warp | multiplying warpgroups | 1 | the tile may be finished |
| `taken` | multiplying warpgroups | looking-out warp | 2 | `cleared` may be used again |

A fused kernel says where tiles come from and go to with the hooks of `Hooks`, and is otherwise the
plain matmul: it copies none of it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed.kernel import THREAD_AXIS, block_id
from stretto.distributed.schedule import Int, ceil_div, rem, share
from stretto.kernels.tile_config import (
    GATE_SLOTS,
    LOADING_REGISTERS,
    MULTIPLYING_REGISTERS,
    MULTIPLYING_WARPGROUPS,
    TileConfig,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gate:
    """Holds the loading warp back until lhs has arrived.

    Attributes:
      columns: of lhs between one gate and the next; a multiple of `tile_k`.
      wait: called in the looking-out warp, ahead of the loads, with (tile, index of the gate along
        k); returns once lhs may be loaded up to the next gate.
    """

    columns: int
    wait: Callable[[Any, jax.Array], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hooks:
    """What a kernel makes of the matmul. A `tile` is whatever `locate` returns.

    Attributes:
      locate: index of a tile, in the order of work -> tile.
      load_lhs, load_rhs: called in the loading warp with (tile, index along k, slot of shared
        memory, barrier); starts the copy that fills the slot and arrives at the barrier.
      finish: called in each multiplying warpgroup with (tile, its float32 part of the product,
        its buffers of shared memory, first row of its part); stores the part (`store`).
      settle: called in each multiplying warpgroup, before `finish` of its next tile, with (tile,
        warpgroup); for what must follow when the stores are complete, such as a signal.
      communicate: runs in a warp of its own, beside everything else; returns when it is done.
      gate: what the loads of lhs wait for, if anything; instead of `clear`.
      clear: called in the looking-out warp, ahead of `finish`, with (tile); returns once the tile
        may be finished; instead of `gate`.
    """

    locate: Callable[[jax.Array], Any]
    load_lhs: Callable[..., None]
    load_rhs: Callable[..., None]
    finish: Callable[..., None]
    settle: Callable[..., None] | None = None
    communicate: Callable[[], None] | None = None
    gate: Gate | None = None
    clear: Callable[[Any], None] | None = None


def run(
    hooks: Hooks, config: TileConfig, *, num_tiles: int, k: int, num_blocks: int, **scratch: Any
) -> None:
    """The body of a matmul kernel: every warpgroup of every block calls it once.

    Args:
      hooks: what this kernel makes of it.
      config: the tiles.
      num_tiles: of the whole device; block `b` takes tiles `b`, `b + num_blocks`, ...
      k: length of the contraction.
      num_blocks: blocks of the grid.
      **scratch: the refs of `tile_config.scratch`, and with a gate of `gate_scratch`, with
        `clear` of `clear_scratch`.
    """
    roles = _Roles(
        hooks=hooks,
        config=config,
        num_blocks=num_blocks,
        own_tiles=share(num_tiles, block_id(), num_blocks),
        k_tiles=ceil_div(k, config.tile_k),
        **scratch,
    )
    warpgroup = lax.axis_index(THREAD_AXIS)

    @pl.when(warpgroup < MULTIPLYING_WARPGROUPS)
    def _():
        plgpu.set_max_registers(MULTIPLYING_REGISTERS, action="increase")
        roles.multiply()

    @pl.when(warpgroup == MULTIPLYING_WARPGROUPS)
    def _():
        plgpu.set_max_registers(LOADING_REGISTERS, action="decrease")
        warps = [roles.load]
        if hooks.communicate is not None:
            warps.append(roles.communicate)
        if hooks.gate is not None:
            warps.append(roles.look_out_for_loads)
        if hooks.clear is not None:
            warps.append(roles.look_out_for_finish)

        @plgpu.warp_map
        def _(warp):
            for index, role in enumerate(warps):
                pl.when(warp == index)(role)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Roles:
    """What the warps of a block do, each a method; `own_tiles` is how many tiles a block has."""

    hooks: Hooks
    config: TileConfig
    num_blocks: int
    own_tiles: Int
    k_tiles: int
    lhs_smem: Any
    rhs_smem: Any
    out_smem: Any
    full: Any
    empty: Any
    opened: Any = None
    passed: Any = None
    cleared: Any = None
    taken: Any = None

    @property
    def tiles_per_gate(self) -> int:
        """Tiles along k between gates."""
        return self.gate.columns // self.config.tile_k

    @property
    def gate(self) -> Gate:
        """The hooks' gate."""
        return _present(self.hooks.gate)

    def tile(self, i: Int) -> Any:
        """This block's `i`-th tile."""
        return self.hooks.locate(block_id() + i * self.num_blocks)

    def gate_slot(self, i: Int, gate: Int) -> Int:
        """The barriers' slot for a gate of the `i`-th tile."""
        return rem(i * ceil_div(self.k_tiles, self.tiles_per_gate) + gate, GATE_SLOTS)

    def communicate(self) -> None:
        with jax.named_scope("communicate"):
            _present(self.hooks.communicate)()

    def look_out_for_loads(self) -> None:
        """Waits for lhs ahead of the loading warp, by at most `GATE_SLOTS` gates."""

        def tile_loop(i, _):
            tile = self.tile(i)

            def gate_loop(gate, _):
                slot = self.gate_slot(i, gate)
                plgpu.barrier_wait(self.passed.at[slot])
                self.gate.wait(tile, gate)
                plgpu.barrier_arrive(self.opened.at[slot])

            lax.fori_loop(0, ceil_div(self.k_tiles, self.tiles_per_gate), gate_loop, None)

        with jax.named_scope("look out"):
            lax.fori_loop(0, self.own_tiles, tile_loop, None)

    def look_out_for_finish(self) -> None:
        """Clears tiles for `finish`, at most one ahead."""

        def tile_loop(i, _):
            _present(self.hooks.clear)(self.tile(i))
            plgpu.barrier_arrive(self.cleared)
            plgpu.barrier_wait(self.taken)

        with jax.named_scope("look out"):
            lax.fori_loop(0, self.own_tiles, tile_loop, None)

    def load(self) -> None:
        """Fills the ring, tile after tile, as slots come free."""
        if self.hooks.gate is not None:
            for slot in range(GATE_SLOTS):
                plgpu.barrier_arrive(self.passed.at[slot])  # All are free at the start.

        def tile_loop(i, stage):
            tile = self.tile(i)

            def k_loop(k_index, stage):
                plgpu.barrier_wait(self.empty.at[stage])
                if self.hooks.gate is not None:
                    self._pass_gate(i, k_index)
                lhs_slot, rhs_slot = self.lhs_smem.at[stage], self.rhs_smem.at[stage]
                self.hooks.load_lhs(tile, k_index, lhs_slot, self.full.at[stage])
                self.hooks.load_rhs(tile, k_index, rhs_slot, self.full.at[stage])
                return _next(stage, self.config.num_stages)

            with jax.named_scope("load"):
                return lax.fori_loop(0, self.k_tiles, k_loop, stage)

        lax.fori_loop(0, self.own_tiles, tile_loop, jnp.int32(0))

    def _pass_gate(self, i: jax.Array, k_index: jax.Array) -> None:
        @pl.when(rem(k_index, self.tiles_per_gate) == 0)
        def _():
            slot = self.gate_slot(i, lax.div(k_index, jnp.int32(self.tiles_per_gate)))
            plgpu.barrier_wait(self.opened.at[slot])
            plgpu.barrier_arrive(self.passed.at[slot])

    def multiply(self) -> None:
        """Half the rows of each tile, then what `finish` makes of them."""
        warpgroup = lax.axis_index(THREAD_AXIS)
        rows = self.config.tile_m // MULTIPLYING_WARPGROUPS
        for stage in range(self.config.num_stages):
            plgpu.barrier_arrive(self.empty.at[stage])  # The whole ring is free at the start.

        def tile_loop(i, stage):
            def product_and_stage(acc):
                with jax.named_scope("multiply"):
                    stage_after = lax.fori_loop(
                        0, self.k_tiles, lambda k, stage: self._multiply_stage(acc, k, stage), stage
                    )
                    return acc[...], stage_after

            accumulator = plgpu.WGMMAAccumulatorRef((rows, self.config.tile_n), jnp.float32)
            product, stage = pl.run_scoped(product_and_stage, accumulator)
            plgpu.barrier_arrive(self.empty.at[_previous(stage, self.config.num_stages)])
            if self.hooks.settle is not None:
                pl.when(i > 0)(lambda: self._settle(i - 1))
            if self.hooks.clear is not None:
                plgpu.barrier_wait(self.cleared)
                plgpu.barrier_arrive(self.taken)
            with jax.named_scope("store"):
                buffers = self.out_smem.at[warpgroup]
                self.hooks.finish(self.tile(i), product, buffers, warpgroup * rows)
            return stage

        lax.fori_loop(0, self.own_tiles, tile_loop, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0, wait_read_only=False)
        if self.hooks.settle is not None:
            pl.when(self.own_tiles > 0)(lambda: self._settle(self.own_tiles - 1))

    def _multiply_stage(self, acc: Any, k_index: jax.Array, stage: jax.Array) -> jax.Array:
        """Adds one stage's product to `acc`, and frees the stage before it."""
        rows = self.config.tile_m // MULTIPLYING_WARPGROUPS
        own_rows = pl.ds(lax.axis_index(THREAD_AXIS) * rows, rows)
        plgpu.barrier_wait(self.full.at[stage])
        plgpu.wgmma(acc, self.lhs_smem.at[stage, own_rows], self.rhs_smem.at[stage])
        plgpu.wgmma_wait(1)  # All but the newest product is done.

        @pl.when(k_index > 0)
        def _():
            plgpu.barrier_arrive(self.empty.at[_previous(stage, self.config.num_stages)])

        return _next(stage, self.config.num_stages)

    def _settle(self, i: Int) -> None:
        plgpu.wait_smem_to_gmem(0, wait_read_only=False)
        _present(self.hooks.settle)(self.tile(i), lax.axis_index(THREAD_AXIS))


type Windows = Callable[[int, int, int, int], Sequence[Any]]


def store(
    product: jax.Array,
    buffers: Any,
    windows: Windows,
    epilogue: Callable[[jax.Array], jax.Array] | None = None,
) -> None:
    """Stores a warpgroup's part of a tile through its buffers, a piece at a time.

    Args:
      product: float32 `[rows, columns]`.
      buffers: shared memory of the result's type, `[store_buffers, 64, 128 bytes]`.
      windows: (first row, rows, first column, columns), relative to the part -> the views of global
        memory, here or on peers, where that piece of the result goes.
      epilogue: applied to each piece, in float32.
    """
    count = buffers.shape[0]
    for number, (row, column, piece) in enumerate(pieces_of(product, buffers)):
        plgpu.wait_smem_to_gmem(count - 1, wait_read_only=True)  # The buffer has been read.
        kept = piece if epilogue is None else epilogue(piece)
        store_piece(kept, buffers.at[number % count], windows, row, column)


def pieces_of(product: jax.Array, buffers: Any) -> list[tuple[int, int, jax.Array]]:
    """(first row, first column, values) of the pieces of `product` that fit into a buffer."""
    rows, columns = buffers.shape[1:]
    corners = itertools.product(
        range(0, product.shape[0], rows), range(0, product.shape[1], columns)
    )
    return [(r, c, product[r : r + rows, c : c + columns]) for r, c in corners]


def store_piece(piece: jax.Array, buffer: Any, windows: Windows, row: int, column: int) -> None:
    """Starts the copies of one piece, through a buffer that is free, as one group of copies."""
    buffer[...] = piece.astype(buffer.dtype)
    plgpu.commit_smem()
    for window in windows(row, piece.shape[0], column, piece.shape[1]):
        plgpu.copy_smem_to_gmem(buffer, window, commit_group=False)
    plgpu.commit_smem_to_gmem_group()


def _present[T](hook: T | None) -> T:
    """`hook`, in a role that only runs where the hooks have it."""
    if hook is None:
        raise TypeError("this role needs a hook that the kernel does not have")
    return hook


def _next(stage, num_stages):
    following = stage + 1
    return lax.select(following == num_stages, jnp.int32(0), following)


def _previous(stage, num_stages):
    return lax.select(stage == 0, jnp.int32(num_stages - 1), stage - 1)
