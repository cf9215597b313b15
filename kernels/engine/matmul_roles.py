"""What the warps of a matmul's block do, and the barriers between them.

| barrier | arrives | waits | count | proves |
|---|---|---|---|---|
| `full[stage]` | both copies into it | multiplying warpgroups | 2 | the stage holds a tile |
| `empty[stage]` | multiplying warpgroups | loading warp | 2 | it may be overwritten |
| `filled[buffer]` | multiplying warpgroups | storing warp | 2 | both halves of a piece are in it |
| `free[buffer]` | storing warp | multiplying warpgroups | 1 | its stores have read it |
| `loaded[buffer]` | both copies into it | multiplying warpgroups | 2 | it holds an addend's piece |
| `added[buffer]` | multiplying warpgroups | storing warp | 2 | they have added it |
| `opened[slot]` | looking-out warp | loading warp | 1 | the next columns of lhs are in place |
| `passed[slot]` | loading warp | looking-out warp | 1 | the slot may be used again |

A result leaves its tile in pieces of 64 rows x 128 bytes for each multiplying warpgroup, through
`store_buffers` buffers in turn; addends come in the same way, before.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed.kernel import THREAD_AXIS, block_id
from stretto.distributed.schedule import Int, ceil_div, rem, share
from stretto.kernels.engine.matmul_hooks import Addends, Gate, Hooks
from stretto.kernels.engine.tile_config import GATE_SLOTS, MULTIPLYING_WARPGROUPS, TileConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roles:
    """What the warps of a block do, each a method; `tiles_of_block` is how many tiles it has."""

    hooks: Hooks
    config: TileConfig
    num_blocks: int
    tiles_of_block: Int
    k_tiles: int
    lhs_smem: Any
    rhs_smem: Any
    out_smem: Any
    full: Any
    empty: Any
    filled: Any
    free: Any
    loaded: Any = None
    added: Any = None
    opened: Any = None
    passed: Any = None

    @staticmethod
    def of_block(
        hooks: Hooks,
        config: TileConfig,
        num_tiles: int,
        k: int,
        num_blocks: int,
        scratch: Mapping[str, Any],
    ) -> Roles:
        """The roles of the block that runs this; arguments as for `matmul.run`."""
        return Roles(
            hooks=hooks,
            config=config,
            num_blocks=num_blocks,
            tiles_of_block=share(num_tiles, block_id(), num_blocks),
            k_tiles=ceil_div(k, config.tile_k),
            **scratch,
        )

    @property
    def num_buffers(self) -> int:
        """Buffers of the store that are in use: at most one for each piece."""
        return min(self.config.store_buffers, len(self._pieces()))

    def tile(self, i: Int) -> Any:
        """This block's `i`-th tile."""
        return self.hooks.locate(block_id() + i * self.num_blocks)

    def communicate(self) -> None:
        """What the kernel moves meanwhile."""
        with jax.named_scope("communicate"):
            _present(self.hooks.communicate)()

    # --- Loading ----------------------------------------------------------------------------------

    @property
    def gate(self) -> Gate:
        """The hooks' gate."""
        return _present(self.hooks.gate)

    @property
    def tiles_per_gate(self) -> int:
        """Tiles along k between gates."""
        return self.gate.columns // self.config.tile_k

    def gate_slot(self, i: Int, gate: Int) -> Int:
        """The barriers' slot for a gate of the `i`-th tile."""
        return rem(i * ceil_div(self.k_tiles, self.tiles_per_gate) + gate, GATE_SLOTS)

    def look_out(self) -> None:
        """Waits for lhs ahead of the loading warp, by at most `GATE_SLOTS` gates.

        The loading warp cannot do so: a look at global memory takes longer than the ring holds out.
        """

        def tile_loop(i, _):
            tile = self.tile(i)

            def gate_loop(gate, _):
                slot = self.gate_slot(i, gate)
                plgpu.barrier_wait(self.passed.at[slot])
                self.gate.wait(tile, gate)
                plgpu.barrier_arrive(self.opened.at[slot])

            lax.fori_loop(0, ceil_div(self.k_tiles, self.tiles_per_gate), gate_loop, None)

        with jax.named_scope("look out"):
            self.gate.before()
            lax.fori_loop(0, self.tiles_of_block, tile_loop, None)

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

        lax.fori_loop(0, self.tiles_of_block, tile_loop, jnp.int32(0))

    def _pass_gate(self, i: jax.Array, k_index: jax.Array) -> None:
        @pl.when(rem(k_index, self.tiles_per_gate) == 0)
        def _():
            slot = self.gate_slot(i, lax.div(k_index, jnp.int32(self.tiles_per_gate)))
            plgpu.barrier_wait(self.opened.at[slot])
            plgpu.barrier_arrive(self.passed.at[slot])

    # --- Multiplying ------------------------------------------------------------------------------

    def multiply(self) -> None:
        """Half the rows of each tile: its product, plus its addends, into the store's buffers."""
        for stage in range(self.config.num_stages):
            plgpu.barrier_arrive(self.empty.at[stage])  # The whole ring is free at the start.

        def tile_loop(i, stage):
            product, stage = self._product(self.tile(i), stage)
            with jax.named_scope("hand over"):
                for index, place in enumerate(self._pieces()):
                    self._hand_over(index, product[self._within_half(place)])
            return stage

        lax.fori_loop(0, self.tiles_of_block, tile_loop, jnp.int32(0))

    def _product(self, tile: Any, stage: jax.Array) -> tuple[jax.Array, jax.Array]:
        """This warpgroup's half of a tile's product, addends included; and the next stage."""
        rows = self.config.tile_m // MULTIPLYING_WARPGROUPS

        def multiply(acc):
            if self.hooks.addends is None:
                stage_after = self._multiply_stages(acc, 0, self.k_tiles, stage)
            else:
                stage_after = self._multiply_and_add(acc, self.hooks.addends, tile, stage)
            return acc[...], stage_after

        accumulator = plgpu.WGMMAAccumulatorRef((rows, self.config.tile_n), jnp.float32)
        product, stage = pl.run_scoped(multiply, accumulator)
        plgpu.barrier_arrive(self.empty.at[_previous(stage, self.config.num_stages)])
        return product, stage

    def _multiply_and_add(
        self, acc: Any, addends: Addends, tile: Any, stage: jax.Array
    ) -> jax.Array:
        """A tile's k loop in parts, with an addend after each part but the last.

        Under each part the storing warp loads the next addend. With fewer k tiles than parts, all
        addends come at the end.
        """
        part = self.k_tiles // (addends.most + 1)
        count = addends.count(tile)
        first = self.k_tiles - count * part  # The first part takes what the others leave.

        def add_and_multiply(number, stage):
            with jax.named_scope("add"):
                self._add(acc)
            k_index = first + number * part
            return self._multiply_stages(acc, k_index, k_index + part, stage)

        stage = self._multiply_stages(acc, 0, first, stage)
        return lax.fori_loop(0, count, add_and_multiply, stage)

    def _multiply_stages(self, acc: Any, first: Int, last: Int, stage: jax.Array) -> jax.Array:
        with jax.named_scope("multiply"):
            return lax.fori_loop(
                first, last, lambda k, stage: self._multiply_stage(acc, k, stage), stage
            )

    def _multiply_stage(self, acc: Any, k_index: jax.Array, stage: jax.Array) -> jax.Array:
        """Adds one stage's product to `acc`, and frees the stage before it."""
        rows = self.config.tile_m // MULTIPLYING_WARPGROUPS
        own_rows = pl.ds(lax.axis_index(THREAD_AXIS) * rows, rows)
        plgpu.barrier_wait(self.full.at[stage])
        rhs = self.rhs_smem.at[stage]
        if self.hooks.rhs_transposed:
            rhs = rhs.transpose((1, 0))
        plgpu.wgmma(acc, self.lhs_smem.at[stage, own_rows], rhs)
        plgpu.wgmma_wait(1)  # All but the newest product is done.

        @pl.when(k_index > 0)
        def _():
            plgpu.barrier_arrive(self.empty.at[_previous(stage, self.config.num_stages)])

        return _next(stage, self.config.num_stages)

    def _add(self, acc: Any) -> None:
        """Adds the next addend to `acc`, in the pieces that the storing warp brings."""
        total, pieces = acc[...], []  # Reading `acc` waits for the products that are under way.
        for index, place in enumerate(self._pieces()):
            buffer = index % self.num_buffers
            plgpu.barrier_wait(self.loaded.at[buffer])
            addend = self._own_buffer(buffer)[...].astype(jnp.float32)
            pieces.append(total[self._within_half(place)] + addend)
            plgpu.commit_smem()  # It has been read before the copy engine writes the next one.
            plgpu.barrier_arrive(self.added.at[buffer])
        # The pieces lie row by row: put each row together, and the rows below each other.
        in_a_row = self.config.tile_n // self.out_smem.shape[-1]
        rows = [jnp.concatenate(row, axis=1) for row in itertools.batched(pieces, in_a_row)]
        acc[...] = jnp.concatenate(rows) if len(rows) > 1 else rows[0]

    def _hand_over(self, index: int, piece: jax.Array) -> None:
        """Puts a piece of the result where the storing warp takes it from."""
        buffer = index % self.num_buffers
        plgpu.barrier_wait(self.free.at[buffer])
        if self.hooks.epilogue is not None:
            piece = self.hooks.epilogue(piece)
        own_buffer = self._own_buffer(buffer)
        own_buffer[...] = piece.astype(own_buffer.dtype)
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.filled.at[buffer])

    def _own_buffer(self, buffer: int) -> Any:
        return self.out_smem.at[lax.axis_index(THREAD_AXIS), buffer]

    # --- Storing ----------------------------------------------------------------------------------

    def store(self) -> None:
        """Stores what the multiplying warpgroups hand over, and brings them the addends."""
        for buffer in range(self.num_buffers):
            plgpu.barrier_arrive(self.free.at[buffer])  # All are free at the start.
        if self.hooks.before_stores is not None:
            self.hooks.before_stores()

        def tile_loop(i, _):
            tile = self.tile(i)
            if self.hooks.addends is not None:
                self._bring_addends(self.hooks.addends, tile)
            self._store_tile(tile)
            if self.hooks.stored is not None:
                plgpu.wait_smem_to_gmem(0, wait_read_only=False)
                self.hooks.stored(tile)

        lax.fori_loop(0, self.tiles_of_block, tile_loop, None)
        plgpu.wait_smem_to_gmem(0, wait_read_only=False)

    def _bring_addends(self, addends: Addends, tile: Any) -> None:
        """Copies the pieces of a tile's addends into the buffers, as they come free.

        They are those of the store, and free at first: this warp has stored the tile before from
        them, and the warpgroups hand this one over only after they have added.
        """
        count = addends.count(tile)

        @pl.when(count > 0)
        def _():
            addends.wait(tile)

            def bring(number, _):
                for index, place in enumerate(self._pieces()):
                    buffer = index % self.num_buffers

                    @pl.when((number > 0) | (index >= self.num_buffers))
                    def _(buffer=buffer):
                        plgpu.barrier_wait(self.added.at[buffer])

                    for half in range(MULTIPLYING_WARPGROUPS):
                        window = addends.window(tile, number, *self._within_tile(place, half))
                        slot = self.out_smem.at[half, buffer]
                        plgpu.copy_gmem_to_smem(window, slot, self.loaded.at[buffer])

            lax.fori_loop(0, count, bring, None)
            for buffer in range(self.num_buffers):
                plgpu.barrier_wait(self.added.at[buffer])

    def _store_tile(self, tile: Any) -> None:
        """Stores a tile's pieces as they are handed over; on return the buffers have been read."""
        with jax.named_scope("store"):
            buffers = self.num_buffers
            for index, place in enumerate(self._pieces()):
                buffer = index % buffers
                plgpu.barrier_wait(self.filled.at[buffer])
                for half in range(MULTIPLYING_WARPGROUPS):
                    row, _, column, _ = self._within_tile(place, half)
                    self.hooks.store(tile, self.out_smem.at[half, buffer], row, column)
                plgpu.commit_smem_to_gmem_group()
                if index >= buffers - 1:  # All buffers are in use: the oldest comes free.
                    plgpu.wait_smem_to_gmem(buffers - 1, wait_read_only=True)
                    plgpu.barrier_arrive(self.free.at[(index + 1) % buffers])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            for index in range(len(self._pieces()) - buffers + 1, len(self._pieces())):
                plgpu.barrier_arrive(self.free.at[index % buffers])

    # --- Pieces of a tile -------------------------------------------------------------------------

    def _pieces(self) -> list[tuple[int, int]]:
        """(first row, first column) of the pieces of a half tile, in the order of their stores."""
        _, _, rows, columns = self.out_smem.shape
        half = self.config.tile_m // MULTIPLYING_WARPGROUPS
        return list(itertools.product(range(0, half, rows), range(0, self.config.tile_n, columns)))

    def _within_half(self, place: tuple[int, int]) -> tuple[slice, slice]:
        _, _, rows, columns = self.out_smem.shape
        row, column = place
        return slice(row, row + rows), slice(column, column + columns)

    def _within_tile(self, place: tuple[int, int], half: int) -> tuple[int, int, int, int]:
        """(first row, rows, first column, columns) of a piece in a half of the tile."""
        _, _, rows, columns = self.out_smem.shape
        row, column = place
        return half * (self.config.tile_m // MULTIPLYING_WARPGROUPS) + row, rows, column, columns


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
