"""Which epilogues with arrays, or of two products, a fused all-gather matmul applies itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from stretto.kernels.engine.hopper.tile_config import TileConfig
from stretto.kernels.engine.shared_memory import SMEM_BYTES
from stretto.kernels.problem import epilogues
from stretto.kernels.problem.options import MatmulOptions

VECTOR_BYTES = 1024  # Of shared memory, for the 256 numbers in float32 of the widest tile.
PAIRED_COLUMNS = 128  # Of a tile of a pair: 64 of either product, a row of the swizzle.


def obstacle(config: Any, options: MatmulOptions, arrays: Sequence[tuple[str, Any]]) -> str | None:
    """Why XLA must apply `options.epilogue` after the kernel; None if the kernel does.

    Args:
      config: of the kernel (`PullConfig`).
      options: of the call, with an epilogue.
      arrays: of the epilogue, each as its kind along the result and its type.
    """
    form = options.epilogue
    if not arrays and (form is None or not form.gated):
        return None  # A function of the product alone.
    if options.scales is not None:
        return "its operands have scales"
    if getattr(config, "unfused", False):
        return None  # A matmul of XLA's, with the epilogue.
    tiles, out = config.tiles, jnp.dtype(options.out_dtype)
    if not isinstance(tiles, TileConfig):
        return "its tiles are not Hopper's"
    if form is not None and form.gated and tiles.tile_n % PAIRED_COLUMNS:
        return f"a tile of {tiles.tile_n} columns holds no pair of products"
    for kind, dtype in arrays:
        exact = dtype == jnp.bool_ or jnp.promote_types(dtype, out) == out
        if kind == "elements" and not exact:
            return f"it has a {jnp.dtype(dtype)} array as large as the {out} result"
    vectors = sum(kind != "elements" for kind, _ in arrays)
    needed = config.smem_bytes(jnp.dtype(jnp.bfloat16).itemsize) + vectors * VECTOR_BYTES
    if needed > SMEM_BYTES:
        return f"its {vectors} rows and columns of numbers do not fit into shared memory"
    return None


def left_of_a_sum(
    config: Any, options: MatmulOptions, arrays: Sequence[tuple[str, Any]]
) -> str | None:
    """The same of a sum over devices, to which a kernel adds one array as large as the result."""
    if config.unfused:
        return "it follows a sum over devices"
    form, out = options.epilogue, jnp.dtype(options.out_dtype)
    if not isinstance(config.tiles, TileConfig):
        return "its tiles are not Hopper's"
    kinds = [kind for kind, _ in arrays]
    if kinds != ["elements"] or form is None or not epilogues.is_sum(form.function):
        return "it follows a sum over devices, and adds more than one array as large as that"
    if jnp.promote_types(arrays[0][1], out) != out:
        return f"its array is {jnp.dtype(arrays[0][1])} and the result {out}"
    return None
