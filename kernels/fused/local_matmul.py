"""`out = lhs @ rhs` on one device: the matmul of the fused kernels, without communication.

Its time is that of a fused kernel if communication were free. Benchmarks time it beside cuBLAS: the
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
from stretto.kernels.engine.architectures import LARGE_SCALED, TILES, TileConfig, mainloop_of
from stretto.kernels.engine.fuse import Refs, fuse
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
      lhs_scale, rhs_scale: float32, or on Blackwell float8_e8m0fnu, as `problem.scales` has them.
      mainloop: creates the main loop, which loads, multiplies and stores tiles.
      interpret: `simulator.SimulatorParams()` to run in the simulator.

    Raises:
      ValueError: operands or scales that do not fit each other or the copy engine.
    """
    granularity, own = None, {}
    if lhs_scale is not None or rhs_scale is not None:
        if not rhs_transposed:
            raise ValueError("rhs in 8 bits must be transposed, [n, k]; pass rhs.T once made.")
        granularity, of_lhs, (of_rhs,) = scales.checked(
            "local_matmul", lhs, [rhs], lhs_scale, [rhs_scale], rhs_transposed=True, mx=True
        )
    if config is None:
        config = _default_config(granularity)
    config.check()
    whole = granularity is not None or not config.takes_edges
    m, k, n = _checked_sizes(lhs, rhs, rhs_transposed, whole=whole)
    if granularity is not None:
        _check_fp8_tiles(config, granularity)
        own = _as_loaded(of_lhs, of_rhs, granularity, config)
    out_dtype = jnp.dtype(out_dtype or (lhs.dtype if granularity is None else jnp.bfloat16))
    order, segments = ShardOrder(m, n, config), Segments.of([n], config.tile_n)

    def rhs_window(tile: Tile, k: Int) -> tiles.Window:
        return tiles.rhs_window(config, k, tile.n, rhs_transposed)

    def parts(refs: Refs) -> Parts:
        return Parts(
            order=order,
            k_tiles=schedule.ceil_div(k, config.tile_k),
            lhs=streams.of(refs.lhs, lambda tile, k: tiles.lhs_window(config, tile.m, k)),
            rhs=streams.of(refs.rhs, rhs_window),
            scales=None if granularity is None else _loads(refs, segments, config, granularity),
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


def _as_loaded(
    of_lhs: jax.Array, of_rhs: jax.Array, granularity: scales.Granularity, config: TileShape
) -> dict[str, jax.Array]:
    """The scales of lhs and of transposed rhs, in the form that the kernel loads."""
    rows = ceil_div(of_lhs.shape[0], config.tile_m) * config.tile_m
    columns = ceil_div(of_rhs.shape[0], config.tile_n) * config.tile_n  # "block" does not use it.
    if granularity == "mx":
        of_lhs = engine_scales.arranged(of_lhs, rows)
        of_rhs = engine_scales.arranged(of_rhs, columns)
    else:
        of_lhs = engine_scales.of_rows(of_lhs, rows)
        of_rhs = engine_scales.of_columns(of_rhs, granularity, columns, transposed=True)
    return dict(lhs_scales=of_lhs, rhs_scales=of_rhs)


def _loads(
    refs: Refs, segments: Segments, config: TileShape, granularity: scales.Granularity
) -> Scales:
    """The loads of the scales of `_as_loaded`."""
    if granularity == "mx":
        return Scales(
            lhs=engine_scales.load_arranged_rows(lambda _: refs.lhs_scales, config),
            rhs=engine_scales.load_arranged_columns(
                [refs.rhs_scales], segments, config, lambda tile: ()
            ),
        )
    return Scales(
        lhs=engine_scales.load_rows(lambda _: refs.lhs_scales, config),
        rhs=engine_scales.load_columns([refs.rhs_scales], segments, config, granularity),
    )


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
    architecture = Machine.of_mesh().architecture
    if architecture not in TILES:
        architecture = HOPPER
    if granularity is None:
        return TILES[architecture].large
    large = LARGE_SCALED[architecture]
    return large.get(granularity, large["block"])  # Its `check_mx` says why there are none.


def _check_fp8_tiles(config: TileShape, granularity: scales.Granularity) -> None:
    """Raises NotImplementedError or ValueError for tiles that scaled products do not have."""
    if not isinstance(config, TileConfig):
        raise NotImplementedError(
            f"scales are built for Hopper and Blackwell, and config={config!r:.60} is for neither;"
            " pass a TileConfig of stretto.kernels.engine.hopper or of"
            " stretto.kernels.engine.blackwell."
        )
    if config.tile_k != scales.BLOCK:
        raise ValueError(
            f"tile_k={config.tile_k} must be {scales.BLOCK} for elements of 8 bits: one row of the"
            " 128 byte swizzle."
        )
    if granularity == "block":
        config.check_blocks()
    if granularity == "mx":
        config.check_mx()
    needed = config.smem_bytes(1) + config.scales_bytes(granularity)
    if needed > SMEM_BYTES:
        raise ValueError(
            f"the kernel needs {needed} bytes of shared memory and a block has {SMEM_BYTES}; take"
            " fewer stages or buffers."
        )
