"""A matmul main loop for Blackwell, to show that the engine takes another one; it is not tuned.

One warpgroup of a block takes totals out of tensor memory. Of the other warps one loads, one issues
products of the tensor cores into tensor memory, one stores. Tensor memory has two accumulators,
which tiles take in turn.

| barrier | arrives | waits | proves |
|---|---|---|---|
| `full[stage]` | both copies into it | issuing warp | the stage holds a tile of lhs and of rhs |
| `empty[stage]` | the tensor cores | loading warp | the products have read the stage |
| `made[half]` | the tensor cores | draining warpgroup | the accumulator holds a tile's total |
| `drained[half]` | draining warpgroup | issuing warp | the accumulator has been read |
| `filled[buffer]` | draining warpgroup | storing warp | the buffer holds a piece |
| `free[buffer]` | storing warp | draining warpgroup | its stores have read the buffer |
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed.schedule import rem
from stretto.kernels.engine.block import Block
from stretto.kernels.engine.gates import Gates
from stretto.kernels.engine.mainloop import Role
from stretto.kernels.engine.parts import Product, Sum
from stretto.kernels.engine.shared_memory import row_elements, swizzled


@dataclasses.dataclass(frozen=True, kw_only=True)
class TileConfig:
    """How a matmul is cut up; an accumulator in tensor memory has 128 rows."""

    tile_m: int = 128
    tile_n: int = 256
    tile_k: int = 64
    num_stages: int = 3
    raster_width: int = 16
    store_buffers: int = 2

    def check(self) -> None:
        if self.tile_m != 128 or self.tile_n % 64 or not 64 <= self.tile_n <= 256:
            raise ValueError(f"{self} must have 128 rows and 64, 128, 192 or 256 columns.")


@dataclasses.dataclass(frozen=True)
class Matmul:
    """The main loop, of plain sums of at least one product."""

    config: TileConfig
    product: Product
    warpgroups = 1
    warps = 3

    def __post_init__(self) -> None:
        if self.product.fold is not Sum:
            raise NotImplementedError(f"there is no fold {self.product.fold.__name__} here.")

    def scratch(self) -> dict[str, Any]:
        c, p = self.config, self.product
        rhs_tile = (c.tile_n, c.tile_k) if p.rhs_transposed else (c.tile_k, c.tile_n)
        out = (c.store_buffers, c.tile_m, row_elements(p.out))
        tensor_cores = functools.partial(plgpu.Barrier, orders_tensor_core=True)
        return dict(
            lhs_smem=plgpu.SMEM(
                (c.num_stages, c.tile_m, c.tile_k), p.lhs, transforms=swizzled(p.lhs)
            ),
            rhs_smem=plgpu.SMEM((c.num_stages, *rhs_tile), p.rhs, transforms=swizzled(p.rhs)),
            out_smem=plgpu.SMEM(out, p.out, transforms=swizzled(p.out)),
            totals=plgpu.TMEM((c.tile_m, 2 * c.tile_n), jnp.float32),
            full=plgpu.Barrier(num_arrivals=2, num_barriers=c.num_stages),
            empty=tensor_cores(num_barriers=c.num_stages),
            made=tensor_cores(num_barriers=2),
            drained=tensor_cores(num_barriers=2),
            filled=plgpu.Barrier(num_barriers=c.store_buffers),
            free=plgpu.Barrier(num_barriers=c.store_buffers),
        )

    def roles(
        self, block: Block, gates: Gates | None, scratch: Mapping[str, Any]
    ) -> Sequence[Role]:
        warps = _Warps(self.config, self.product, block, gates, scratch)
        return [
            Role(warps.drain, warpgroups=1),
            Role(warps.load),
            Role(warps.multiply),
            Role(warps.store),
        ]


@dataclasses.dataclass(frozen=True)
class _Warps:
    config: TileConfig
    product: Product
    block: Block
    gates: Gates | None
    scratch: Mapping[str, Any]

    def load(self) -> None:
        lhs, rhs, full, empty = (self.scratch[n] for n in ("lhs_smem", "rhs_smem", "full", "empty"))
        gates, parts, stages = self.gates, self.block.parts, self.config.num_stages
        if gates is not None:
            gates.free_slots()

        def tile_loop(i, loaded):
            tile = self.block.tile(i)

            def k_loop(k, loaded):
                stage = rem(loaded, stages)
                pl.when(loaded >= stages)(lambda: plgpu.barrier_wait(empty.at[stage]))
                if gates is not None:
                    gates.go_through(i, k)
                parts.lhs.load(tile, k, lhs.at[stage], full.at[stage])
                parts.rhs.load(tile, k, rhs.at[stage], full.at[stage])
                return loaded + 1

            return lax.fori_loop(0, self.block.k_tiles(tile), k_loop, loaded)

        lax.fori_loop(0, self.block.num_tiles, tile_loop, jnp.int32(0))

    def multiply(self) -> None:
        lhs, rhs, full, empty = (self.scratch[n] for n in ("lhs_smem", "rhs_smem", "full", "empty"))
        made, drained = self.scratch["made"], self.scratch["drained"]

        def tile_loop(i, issued):
            half = rem(i, 2)
            pl.when(i >= 2)(lambda: plgpu.barrier_wait(drained.at[half]))

            def k_loop(k, issued):
                stage = rem(issued, self.config.num_stages)
                plgpu.barrier_wait(full.at[stage])
                operand = rhs.at[stage]
                if self.product.rhs_transposed:
                    operand = operand.transpose((1, 0))
                total = self._total(half, 0, self.config.tile_n)
                plgpu.tcgen05_mma(total, lhs.at[stage], operand, empty.at[stage], accumulate=k > 0)
                return issued + 1

            k_tiles = self.block.k_tiles(self.block.tile(i))
            issued = lax.fori_loop(0, k_tiles, k_loop, issued)
            plgpu.tcgen05_commit_arrive(made.at[half])
            return issued

        lax.fori_loop(0, self.block.num_tiles, tile_loop, jnp.int32(0))

    def drain(self) -> None:
        out, epilogue = self.scratch["out_smem"], self.block.parts.epilogue
        columns = out.shape[-1]

        def tile_loop(i, _):
            half, tile = rem(i, 2), self.block.tile(i)
            plgpu.barrier_wait(self.scratch["made"].at[half])
            for index in range(self._pieces):
                buffer = index % self.config.store_buffers
                is_used = i * self._pieces + index >= self.config.store_buffers
                free = self.scratch["free"].at[buffer]
                pl.when(is_used)(lambda free=free: plgpu.barrier_wait(free))
                piece = plgpu.async_load_tmem(self._total(half, index * columns, columns))
                plgpu.wait_load_tmem()
                if epilogue is not None:
                    piece = epilogue(piece, tile, 0, index * columns)
                out.at[buffer][...] = piece.astype(out.dtype)
                plgpu.commit_smem()
                plgpu.barrier_arrive(self.scratch["filled"].at[buffer])
            plgpu.barrier_arrive(self.scratch["drained"].at[half])

        lax.fori_loop(0, self.block.num_tiles, tile_loop, None)

    def store(self) -> None:
        out, sink = self.scratch["out_smem"], self.block.parts.sink
        self.block.before_stores()

        def tile_loop(i, _):
            tile = self.block.tile(i)
            for index in range(self._pieces):
                buffer = index % self.config.store_buffers
                plgpu.barrier_wait(self.scratch["filled"].at[buffer])
                sink.store(tile, out.at[buffer], 0, index * out.shape[-1])
                plgpu.commit_smem_to_gmem_group()
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.barrier_arrive(self.scratch["free"].at[buffer])
            if sink.stored is not None:
                plgpu.wait_smem_to_gmem(0, wait_read_only=False)
                sink.stored(tile)

        lax.fori_loop(0, self.block.num_tiles, tile_loop, None)
        plgpu.wait_smem_to_gmem(0, wait_read_only=False)

    @property
    def _pieces(self) -> int:
        return self.config.tile_n // self.scratch["out_smem"].shape[-1]

    def _total(self, half: jax.Array, column: int, columns: int) -> Any:
        first = half * self.config.tile_n + column
        return self.scratch["totals"].at[:, pl.ds(first, columns)]
