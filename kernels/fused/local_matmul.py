"""`out = lhs @ rhs` on one device: the shared matmul with nothing to move between devices.

What a fused kernel would take if communication were free. Benchmarks time it beside cuBLAS: the
faster of the two is the arithmetic part of a fused kernel's floor.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from stretto.distributed import schedule
from stretto.kernels.engine import padding, sinks, streams, tiles
from stretto.kernels.engine.architectures import TILES, mainloop_of
from stretto.kernels.engine.fuse import Refs, fuse
from stretto.kernels.engine.mainloop import Factory
from stretto.kernels.engine.orders import ShardOrder
from stretto.kernels.engine.parts import Parts, Product
from stretto.kernels.engine.segments import Segments
from stretto.kernels.engine.tiles import TileShape
from stretto.kernels.problem.machine import HOPPER, Machine


def local_matmul(
    lhs: jax.Array,
    rhs: jax.Array,
    *,
    out_dtype: jax.typing.DTypeLike | None = None,
    config: TileShape | None = None,
    mainloop: Factory = mainloop_of,
    interpret: Any = None,
) -> jax.Array:
    """`lhs @ rhs` in float32, rounded once: `[m, k] @ [k, n] -> [m, n]`.

    Args:
      lhs, rhs: bfloat16 or float16, m a multiple of 8, k and n of 64.
      out_dtype: lhs's type by default.
      config: the tiles; by default, large ones for the devices' architecture.
      mainloop: makes what loads, multiplies and stores them.
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
    if config is None:
        config = TILES.get(Machine.of_mesh().architecture, TILES[HOPPER]).large
    config.check()
    out_dtype = jnp.dtype(out_dtype or lhs.dtype)
    order = ShardOrder(m, n, config)

    def parts(refs: Refs) -> Parts:
        return Parts(
            order=order,
            k_tiles=schedule.ceil_div(k, config.tile_k),
            lhs=streams.of(refs.lhs, lambda tile, k: tiles.lhs_window(config, tile.m, k)),
            rhs=streams.of(refs.rhs, lambda tile, k: tiles.rhs_window(config, k, tile.n)),
            sink=sinks.along_n([refs.out], Segments.of([n], config.tile_n), config),
        )

    product = Product(lhs=lhs.dtype, rhs=rhs.dtype, out=out_dtype)
    results = fuse(
        parts,
        name="local_matmul",
        team=None,
        mainloop=mainloop(config, product),
        num_tiles=order.num_tiles,
        operands=dict(lhs=lhs, rhs=rhs),
        outs=dict(out=jax.ShapeDtypeStruct((m, n), out_dtype)),
        interpret=interpret,
    )
    return results["out"]
