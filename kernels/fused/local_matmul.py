"""`out = lhs @ rhs` on one device: the shared matmul with nothing to move between devices.

What a fused kernel would take if communication were free. Benchmarks time it beside cuBLAS: the
faster of the two is the arithmetic part of a fused kernel's floor.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from stretto.distributed import schedule
from stretto.distributed.schedule import Int, ceil_div
from stretto.kernels.engine import padding, sinks, streams, tiles
from stretto.kernels.engine import scales as engine_scales
from stretto.kernels.engine.architectures import TILES, mainloop_of
from stretto.kernels.engine.fuse import Refs, fuse
from stretto.kernels.engine.hopper.tile_config import BLOCKS, LARGE_FP8, TileConfig
from stretto.kernels.engine.mainloop import Factory
from stretto.kernels.engine.orders import ShardOrder
from stretto.kernels.engine.parts import Parts, Product, Scales, Tile
from stretto.kernels.engine.segments import Segments
from stretto.kernels.engine.shared_memory import SMEM_BYTES
from stretto.kernels.engine.tiles import TileShape
from stretto.kernels.problem import scales
from stretto.kernels.problem.machine import HOPPER, Machine


def local_matmul(
    lhs: jax.Array,
    rhs: jax.Array,
    *,
    out_dtype: jax.typing.DTypeLike | None = None,
    config: TileShape | None = None,
    rhs_transposed: bool = False,
    lhs_scale: jax.Array | None = None,
    rhs_scale: jax.Array | None = None,
    mainloop: Factory = mainloop_of,
    interpret: Any = None,
) -> jax.Array:
    """`lhs @ rhs` in float32, rounded once: `[m, k] @ [k, n] -> [m, n]`.

    Or `(lhs * lhs_scale) @ (rhs * rhs_scale)`, of operands in 8 bits.

    Args:
      lhs, rhs: bfloat16 or float16, k and n multiples of 8: rows of 16 bytes. With tiles for
        Blackwell m must be a multiple of 8, k and n of 64. Or float8_e4m3fn and float8_e5m2, also
        mixed, with scales: m a multiple of 8, k of 128, n of 64, and rhs transposed, since
        Hopper's tensor cores take operands in 8 bits along k only.
      out_dtype: lhs's type by default; with scales bfloat16.
      config: the tiles; by default, large ones for the devices' architecture.
      rhs_transposed: rhs is given as `[n, k]`.
      lhs_scale, rhs_scale: float32, as `problem.scales` has them; both or none.
      mainloop: makes what loads, multiplies and stores them.
      interpret: `simulator.SimulatorParams()` to run in the simulator.

    Raises:
      ValueError: operands or scales that do not fit each other or the copy engine.
    """
    granularity, own = None, {}
    if lhs_scale is not None or rhs_scale is not None:
        if not rhs_transposed:
            raise ValueError("rhs in 8 bits must be transposed, [n, k]; pass rhs.T once made.")
        granularity, of_lhs, (of_rhs,) = scales.checked(
            "local_matmul", lhs, [rhs], lhs_scale, [rhs_scale], rhs_transposed=True
        )
    if config is None:
        config = _default_config(granularity)
    config.check()
    whole = granularity is not None or not config.takes_edges
    m, k, n = _checked_sizes(lhs, rhs, rhs_transposed, whole=whole)
    if granularity is not None:
        _check_fp8_tiles(config, granularity)
        rows, columns = (
            ceil_div(size, tile) * tile for size, tile in ((m, config.tile_m), (n, config.tile_n))
        )
        own = dict(
            lhs_scales=engine_scales.of_rows(of_lhs, rows),
            rhs_scales=engine_scales.of_columns(of_rhs, granularity, columns, transposed=True),
        )
    out_dtype = jnp.dtype(out_dtype or (lhs.dtype if granularity is None else jnp.bfloat16))
    order, segments = ShardOrder(m, n, config), Segments.of([n], config.tile_n)

    def rhs_window(tile: Tile, k: Int) -> tiles.Window:
        return tiles.rhs_window(config, k, tile.n, rhs_transposed)

    def scales_of(refs: Refs) -> Scales | None:
        if granularity is None:
            return None
        return Scales(
            lhs=engine_scales.load_rows(lambda _: refs.lhs_scales, config),
            rhs=engine_scales.load_columns([refs.rhs_scales], segments, config, granularity),
        )

    def parts(refs: Refs) -> Parts:
        return Parts(
            order=order,
            k_tiles=schedule.ceil_div(k, config.tile_k),
            lhs=streams.of(refs.lhs, lambda tile, k: tiles.lhs_window(config, tile.m, k)),
            rhs=streams.of(refs.rhs, rhs_window),
            scales=scales_of(refs),
            sink=sinks.along_n([refs.out], segments, config),
        )

    product = Product(
        lhs=lhs.dtype,
        rhs=rhs.dtype,
        out=out_dtype,
        rhs_transposed=rhs_transposed,
        scales=granularity,
        **padding.edges(config, lhs=lhs, rhs=rhs, out=jax.ShapeDtypeStruct((m, n), out_dtype)),
    )
    results = fuse(
        parts,
        name="local_matmul",
        team=None,
        mainloop=mainloop(config, product),
        num_tiles=order.num_tiles,
        operands=dict(lhs=lhs, rhs=rhs, **own),
        outs=dict(out=jax.ShapeDtypeStruct((m, n), out_dtype)),
        interpret=interpret,
    )
    return results["out"]


def _checked_sizes(
    lhs: jax.Array, rhs: jax.Array, rhs_transposed: bool, *, whole: bool
) -> tuple[int, int, int]:
    """m, k and n; ValueError unless operands fit each other and the copy engine.

    `whole` asks for operands of whole tiles.
    """
    (m, k), (rhs_k, n) = lhs.shape, rhs.shape[::-1] if rhs_transposed else rhs.shape
    multiples = (padding.ROWS, padding.columns_of(lhs.dtype), padding.COLUMNS)
    if not whole:
        in_a_row = padding.ROW_BYTES // lhs.dtype.itemsize
        multiples = (1, in_a_row, in_a_row)
    for name, size, multiple in zip("mkn", (m, k, n), multiples, strict=True):
        if not size or size % multiple:
            raise ValueError(f"{name}={size} must be a multiple of {multiple}; pad the operands.")
    if rhs_k != k:
        raise ValueError(f"lhs has k={k} columns and rhs k={rhs_k} rows; they must be equal.")
    return m, k, n


def _default_config(granularity: scales.Granularity | None) -> TileShape:
    """Large tiles for the devices' architecture."""
    if granularity is not None:
        return BLOCKS if granularity == "block" else LARGE_FP8
    return TILES.get(Machine.of_mesh().architecture, TILES[HOPPER]).large


def _check_fp8_tiles(config: TileShape, granularity: scales.Granularity) -> None:
    """Raises NotImplementedError or ValueError for tiles that scaled products do not have."""
    if not isinstance(config, TileConfig):
        raise NotImplementedError(
            f"scales are built for Hopper alone, and config={config!r:.60} is not for it; pass a"
            " stretto.kernels.engine.hopper.tile_config.TileConfig."
        )
    if config.tile_k != scales.BLOCK:
        raise ValueError(
            f"tile_k={config.tile_k} must be {scales.BLOCK} for elements of 8 bits: one row of the"
            " 128 byte swizzle."
        )
    if granularity == "block":
        config.check_blocks()
    needed = config.smem_bytes(1) + config.scales_bytes(granularity)
    if needed > SMEM_BYTES:
        raise ValueError(
            f"the kernel needs {needed} bytes of shared memory and a block has {SMEM_BYTES}; take"
            " fewer stages or buffers."
        )
