"""The kernel of a grouped matmul with an activation (`activated`), and what it takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from stretto.kernels.engine import padding, streams
from stretto.kernels.engine.architectures import mainloop_of
from stretto.kernels.engine.fuse import Refs, fuse
from stretto.kernels.engine.hopper.tile_config import TileConfig
from stretto.kernels.engine.parts import Parts
from stretto.kernels.fused.activated import Activated
from stretto.kernels.fused.group_tables import cut_off, row_tiles
from stretto.kernels.problem import epilogues, lowered
from stretto.kernels.problem.machine import BLACKWELL, Machine
from stretto.kernels.problem.scales import FP8

COLUMNS = 128  # Of a pair's tile: half of them are a piece of the result, a row of the swizzle.


def obstacle(
    x: jax.Array,
    sides: Sequence[jax.Array],
    function: Callable[..., jax.Array],
    *,
    gated: bool,
    tiles: Any,
) -> str | None:
    """Why no kernel applies an activation to such a product; None if one does.

    Of x in 8 bits `sides` are transposed, and have scales of rows and columns.
    """
    is_scaled = x.dtype.name in FP8
    if not is_scaled and x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it takes bfloat16, float16 and 8 bits, not {x.dtype}."
    if not isinstance(tiles, TileConfig) or Machine.of_mesh().architecture == BLACKWELL:
        return "an activation in a grouped product is built for Hopper GPUs only."
    if 0 in (*x.shape, *sides[0].shape):
        return "there is nothing to do."
    if gated and tiles.tile_n % COLUMNS:
        return f"tile_n={tiles.tile_n} of gate and up is no multiple of {COLUMNS}."
    columns = sides[0].shape[1 if is_scaled else 2] // (2 if gated and len(sides) == 1 else 1)
    if gated and len(sides) == 1 and columns % padding.COLUMNS:
        return f"up begins at column {columns} of w_in, which is no multiple of {padding.COLUMNS}."
    name, dtypes = epilogues.name_of(function), [jnp.dtype(jnp.float32)] * (1 + gated)
    try:
        found = epilogues.obstacle("mixture_of_experts", function, [(len(x), columns)], dtypes)
    except ValueError as error:  # It mixes elements, as XLA may.
        return str(error)
    return found or lowered.obstacle(name, function, dtypes)


def activated_product(
    lhs: jax.Array,
    sizes: jax.Array,
    activated: Activated,
    *,
    out_dtype: jax.typing.DTypeLike | None = None,
    interpret: Any,
) -> jax.Array:
    """`[m, d]` in the order of the experts, `sizes` `[e]` of them -> `[m, f]`.

    The result is of lhs's type, or of `out_dtype`. Rows of no expert are not written.
    """
    m, tiles, out = lhs.shape[0], activated.tiles, jnp.dtype(out_dtype or lhs.dtype)
    sizes = cut_off(sizes, m)  # As of the next product, so that XLA makes their tables once.
    lhs = padding.pad_to_tiles(lhs, padding.ROWS)
    rows = len(lhs)
    grouped = activated.rows(rows)

    def parts(refs: Refs) -> Parts:
        return activated.parts(refs, grouped, streams.of(refs.lhs, grouped.lhs_window))

    return fuse(
        parts,
        name="grouped_activation",
        team=None,
        mainloop=mainloop_of(tiles, activated.product(lhs.dtype, out)),
        num_tiles=grouped.num_tiles,
        operands=dict(
            lhs=lhs,
            table=row_tiles(sizes, rows, tiles.tile_m, grouped.most, of_groups=True),
            **activated.operands(),
        ),
        outs=dict(out=jax.ShapeDtypeStruct((rows, grouped.n), out)),
        interpret=interpret,
    )["out"][:m, : activated.width]
