"""Products of operands in 8 bits with scales, by XLA: the oracle, and what `auto` falls back on.

| granularity | on a GPU | elsewhere |
|---|---|---|
| "row" | cuBLAS's product of 8 bits, times the scales in float32 | dequantised, in float32 |
| "row", both float8_e5m2, which cuBLAS lacks | the values as bfloat16, which is exact, times the scales | the same |
| "block", "mx" | dequantised to bfloat16: XLA has no such product for Hopper (JAX 0.11.2) | the same |

cuBLAS adds up with "fast accumulation", as the kernels do with such scales: XLA takes it at JAX's
default precision, and `jax.default_matmul_precision("highest")` around the call takes float32's.
"""  # noqa: E501

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from stretto.kernels.problem.machine import Machine
from stretto.kernels.problem.scales import MX_BLOCK, Granularity
from stretto.kernels.xla import ragged
from stretto.kernels.xla.quantisation import as_rounded, dequantise

E5M2 = jnp.dtype(jnp.float8_e5m2)


def scaled_matmul(
    lhs: jax.Array,
    rhs: jax.Array,
    lhs_scale: jax.Array,
    rhs_scale: jax.Array,
    granularity: Granularity,
    *,
    rhs_transposed: bool,
    lhs_parts: int = 1,
) -> jax.Array:
    """`(lhs * lhs_scale) @ (rhs * rhs_scale)` in float32, `[..., k]` and `[k, n]` or `[n, k]`.

    Scales are as `problem.scales.checked` returns them: of blocks, or of every row and column. Lhs
    may be of several equal parts along k, each with scales of its own, which lie side by side.
    """
    parts = jnp.split(lhs, lhs_parts, axis=-1), jnp.split(lhs_scale, lhs_parts, axis=-1)
    if granularity != "row":
        wide = compute_dtype()
        if granularity == "mx":  # Of one type with those of "block", an element for each 32.
            parts = parts[0], [_of_elements(s, x) for x, s in zip(*parts, strict=True)]
            rhs_scale = _of_elements(rhs_scale, rhs)
        dequantised = [dequantise(x, of_x, wide) for x, of_x in zip(*parts, strict=True)]
        whole = jnp.concatenate(dequantised, axis=-1)
        return _product(whole, dequantise(rhs, rhs_scale, wide), rhs_transposed)
    sides = jnp.split(rhs, lhs_parts, axis=1 if rhs_transposed else 0)
    products = [
        _product(*multiplied_as(x, side), rhs_transposed) * of_x
        for x, of_x, side in zip(*parts, sides, strict=True)
    ]
    product = functools.reduce(jnp.add, products)
    return product * (rhs_scale.T if rhs_transposed else rhs_scale)


def _of_elements(scale: jax.Array, x: jax.Array) -> jax.Array:
    """A scale of "mx" for each element of x, in float32."""
    repeated = jnp.repeat(scale.astype(jnp.float32), MX_BLOCK, axis=-1)
    return repeated[..., : x.shape[-1]]


def sum_of_scaled_products(
    lhs: Sequence[jax.Array],
    rhs: Sequence[jax.Array],
    lhs_scale: Sequence[jax.Array],
    rhs_scale: Sequence[jax.Array],
    granularity: Granularity,
    *,
    rhs_transposed: bool,
) -> jax.Array:
    """The sum of all pairs' scaled products, in float32."""
    each = zip(lhs, rhs, lhs_scale, rhs_scale, strict=True)
    products = [scaled_matmul(*one, granularity, rhs_transposed=rhs_transposed) for one in each]
    return functools.reduce(jnp.add, products)


def scaled_ragged_matmul(
    lhs: jax.Array,
    rhs: jax.Array,
    ends: jax.Array,
    lhs_scale: jax.Array,
    rhs_scale: jax.Array,
    granularity: Granularity,
    *,
    rhs_transposed: bool,
) -> jax.Array:
    """The same of rows in groups with a matrix of rhs each, by `lax.ragged_dot`, in float32.

    `ends` are the rows after the last ones of groups; rows beyond are zero. XLA has no such product
    of 8 bits, so the values are multiplied as bfloat16, which they are exactly.
    """
    wide, m = compute_dtype(), lhs.shape[0]
    sizes, row = jnp.diff(ends, prepend=0), jnp.arange(m)
    if granularity == "mx":
        lhs_scale, rhs_scale = _of_elements(lhs_scale, lhs), _of_elements(rhs_scale, rhs)
    if granularity != "row":
        values = dequantise(lhs, lhs_scale, wide), dequantise(rhs, rhs_scale, wide)
    else:
        values = as_rounded(lhs).astype(wide), as_rounded(rhs).astype(wide)
    x, y = values
    y = y.swapaxes(1, 2) if rhs_transposed else y
    out = ragged.product(x, y, sizes)
    if granularity == "row":
        group = jnp.minimum(jnp.sum(ends <= row[:, None], axis=1), len(ends) - 1)
        of_columns = rhs_scale[:, :, 0] if rhs_transposed else rhs_scale[:, 0]
        out = out * lhs_scale * of_columns[group]
    return jnp.where((row < ends[-1])[:, None], out, 0)


def compute_dtype() -> jnp.dtype:
    """The type that operands are dequantised to; a CPU is no faster with bfloat16."""
    return jnp.dtype(jnp.bfloat16 if Machine.of_mesh().platform == "gpu" else jnp.float32)


def multiplied_as(lhs: jax.Array, rhs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The values in a type whose products XLA has: 8 bits on a GPU, unless both are float8_e5m2."""
    if Machine.of_mesh().platform == "gpu" and not (lhs.dtype == rhs.dtype == E5M2):
        return lhs, rhs
    wide = compute_dtype()
    return as_rounded(lhs).astype(wide), as_rounded(rhs).astype(wide)


def _product(lhs: jax.Array, rhs: jax.Array, rhs_transposed: bool) -> jax.Array:
    dimensions = ((lhs.ndim - 1,), (1 if rhs_transposed else 0,)), ((), ())
    return lax.dot_general(lhs, rhs, dimensions, preferred_element_type=jnp.float32)
