"""`out = lhs @ rhs` on one device: the shared matmul with nothing to move between devices.

What a fused kernel would take if communication were free. Benchmarks time it beside cuBLAS: the
faster of the two is the arithmetic part of a fused kernel's floor.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed import kernel
from stretto.kernels.engine import matmul, padding, tile_config, tiles
from stretto.kernels.engine.tile_config import TileConfig


def local_matmul(
    lhs: jax.Array,
    rhs: jax.Array,
    *,
    out_dtype: jax.typing.DTypeLike | None = None,
    config: TileConfig | None = None,
    interpret: Any = None,
) -> jax.Array:
    """`lhs @ rhs` in float32, rounded once: `[m, k] @ [k, n] -> [m, n]`.

    Args:
      lhs, rhs: bfloat16 or float16, m a multiple of 8, k and n of 64.
      out_dtype: lhs's type by default.
      config: the tiles.
      interpret: `simulator.SimulatorParams()` to run in the simulator.

    Raises:
      ValueError: operands that do not fit each other or the copy engine.
    """
    (m, k), (rhs_k, n) = lhs.shape, rhs.shape
    for name, size, multiple in (
        ("m", m, padding.ROWS),
        ("k", k, padding.COLUMNS),
        ("n", n, padding.COLUMNS),
    ):
        if not size or size % multiple:
            raise ValueError(f"{name}={size} must be a multiple of {multiple}; pad the operands.")
    if rhs_k != k:
        raise ValueError(f"lhs has k={k} columns and rhs k={rhs_k} rows; they must be equal.")
    config = config or TileConfig()
    config.check()
    out_dtype = jnp.dtype(out_dtype or lhs.dtype)
    # One shard, which is the whole: the step of a tile is always 0.
    order = tiles.ShardOrder(m, n, config)
    num_blocks = kernel.num_multiprocessors()

    def body(lhs_ref, rhs_ref, out_ref, **own):
        matmul.run(
            _hooks(order, lhs_ref, rhs_ref, out_ref),
            config,
            num_tiles=order.tiles_per_shard,
            k=k,
            num_blocks=num_blocks,
            **own,
        )

    (out,) = kernel.launch(
        body,
        lhs,
        rhs,
        name="local_matmul",
        team=None,
        out_type=[jax.ShapeDtypeStruct((m, n), out_dtype)],
        num_blocks=num_blocks,
        num_threads=tile_config.NUM_WARPGROUPS,
        scratch=tile_config.scratch(config, lhs.dtype, out_dtype),
        interpret=interpret,
    )
    return out


def _hooks(order: tiles.ShardOrder, lhs_ref: Any, rhs_ref: Any, out_ref: Any) -> matmul.Hooks:
    config = order.config

    def load_lhs(tile, k_index, slot, barrier):
        _, m, _ = tile
        plgpu.copy_gmem_to_smem(lhs_ref.at[config.lhs_tile(m, k_index)], slot, barrier)

    def load_rhs(tile, k_index, slot, barrier):
        _, _, n = tile
        plgpu.copy_gmem_to_smem(rhs_ref.at[config.rhs_tile(k_index, n)], slot, barrier)

    def store(tile, part, row, column):
        _, m, n = tile
        rows, columns = part.shape
        row_slice = pl.ds(m * config.tile_m + row, rows)
        window = out_ref.at[row_slice, pl.ds(n * config.tile_n + column, columns)]
        plgpu.copy_smem_to_gmem(part, window, commit_group=False)

    return matmul.Hooks(locate=order.locate, load_lhs=load_lhs, load_rhs=load_rhs, store=store)
