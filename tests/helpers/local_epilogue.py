"""A matmul on one device whose epilogue has arrays, or two products: the parts of the fused ones.

What such an epilogue costs is seen here without anything that moves between devices.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax

from stretto.distributed import schedule
from stretto.kernels.engine import beside, pairs, sinks, streams, tiles
from stretto.kernels.engine.architectures import mainloop_of
from stretto.kernels.engine.fuse import Refs, fuse
from stretto.kernels.engine.hopper.tile_config import LARGE, TileConfig
from stretto.kernels.engine.orders import ShardOrder
from stretto.kernels.engine.parts import Parts, Product
from stretto.kernels.engine.segments import Segments
from stretto.kernels.problem.epilogue import Epilogue, Form


def local_epilogue(
    lhs: jax.Array,
    rhs: Sequence[jax.Array],
    epilogue: Epilogue,
    *,
    out_dtype: Any = None,
    config: TileConfig = LARGE,
    interpret: Any = None,
) -> jax.Array:
    """`epilogue(lhs @ rhs[0], ...)` of `[m, k]` and one `[k, n]`, or two; sizes fill no tile."""
    (m, k), n = lhs.shape, rhs[0].shape[1]
    form = Form(epilogue.function, epilogue.gated)
    taken = beside.of(form, epilogue.arrays)
    if taken is None:
        raise ValueError("the epilogue is a function of the product alone.")
    of_result = pairs.halved(config) if form.gated else config
    segments = Segments.of([n], of_result.tile_n)
    order = ShardOrder(m, segments.total * config.tile_n, config)
    out = jax.ShapeDtypeStruct((m, n), out_dtype or lhs.dtype)

    def parts(refs: Refs) -> Parts:
        if form.gated:
            window = functools.partial(tiles.rhs_window, of_result)
            stream = pairs.pair_along_n(refs.rhs, config, False, window)
        else:
            stream = streams.along_n(
                refs.rhs, segments, lambda k, n: tiles.rhs_window(config, k, n)
            )
        return Parts(
            order=order,
            k_tiles=schedule.ceil_div(k, config.tile_k),
            lhs=streams.of(refs.lhs, lambda tile, k: tiles.lhs_window(config, tile.m, k)),
            rhs=stream,
            sink=sinks.along_n([refs.out], segments, of_result),
            beside=beside.parts_of(form.function, taken, refs.beside, segments, of_result),
        )

    product = Product(lhs=lhs.dtype, rhs=rhs[0].dtype, out=out.dtype, beside=taken)
    return fuse(
        parts,
        name="local_epilogue",
        team=None,
        mainloop=mainloop_of(config, product),
        num_tiles=order.num_tiles,
        operands=dict(
            lhs=lhs,
            rhs=rhs,
            beside=beside.all_in_memory(epilogue.arrays, [out], of_result, 1),
        ),
        outs=dict(out=out),
        interpret=interpret,
    )["out"]
