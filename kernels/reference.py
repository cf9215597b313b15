"""The operations through XLA's collectives: the reference, and `backend="xla"` on any platform.

They are what a model author would write by hand. A matmul accumulates in float32 and is rounded
once, to `out_dtype`; sums across devices are made in the type of the operand that is summed, so 16
bit sums are rounded at every hop (pass `out_dtype=jnp.float32` where that matters). The fused
kernels sum in float32.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from stretto.distributed.axes import AxisNames

type Epilogue = Callable[[jax.Array], jax.Array]


def accumulator_dtype(dtype: jax.typing.DTypeLike) -> jnp.dtype:
    """The type in which products of `dtype` are summed: float32, or `dtype` where that is wider."""
    dtype = jnp.dtype(dtype)
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.promote_types(dtype, jnp.float32)
    return dtype


def matmul(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """`lhs @ rhs`, `[m, k] @ [k, n]`, in the type of `accumulator_dtype`."""
    return jnp.matmul(lhs, rhs, preferred_element_type=accumulator_dtype(lhs.dtype))


def all_gather(x: jax.Array, axis_name: AxisNames, *, axis: int) -> jax.Array:
    """Concatenation along `axis` of every device's `x`."""
    if not x.size:  # XLA refuses to move nothing.
        return jnp.concatenate([x] * lax.axis_size(axis_name), axis)
    return lax.all_gather(x, axis_name, axis=axis, tiled=True)


def reduce_scatter(x: jax.Array, axis_name: AxisNames, *, axis: int) -> jax.Array:
    """This device's part along `axis` of the sum of every device's `x`."""
    if not x.size:
        return lax.slice_in_dim(x, 0, x.shape[axis] // lax.axis_size(axis_name), axis=axis)
    return lax.psum_scatter(x, axis_name, scatter_dimension=axis, tiled=True)


def all_reduce(x: jax.Array, axis_name: AxisNames) -> jax.Array:
    """Sum of every device's `x`."""
    return lax.psum(x, axis_name)


def all_to_all(
    x: jax.Array, axis_name: AxisNames, *, split_axis: int, concat_axis: int
) -> jax.Array:
    """Part `i` of `x` along `split_axis` goes to device `i`; parts join on `concat_axis`."""
    if not x.size:
        parts = jnp.split(x, lax.axis_size(axis_name), split_axis)
        return jnp.concatenate(parts, concat_axis)
    return lax.all_to_all(x, axis_name, split_axis, concat_axis, tiled=True)


def all_gather_matmul(
    lhs: jax.Array,
    rhs: jax.Array,
    axis_name: AxisNames,
    *,
    epilogue: Epilogue | None,
    out_dtype: jax.typing.DTypeLike,
) -> jax.Array:
    """`epilogue(all_gather(lhs) @ rhs)`."""
    out = matmul(all_gather(lhs, axis_name, axis=0), rhs)
    return (out if epilogue is None else epilogue(out)).astype(out_dtype)


def matmul_reduce_scatter(
    lhs: jax.Array, rhs: jax.Array, axis_name: AxisNames, *, out_dtype: jax.typing.DTypeLike
) -> jax.Array:
    """`reduce_scatter(lhs @ rhs)`, along the rows."""
    return reduce_scatter(matmul(lhs, rhs).astype(out_dtype), axis_name, axis=0)


def matmul_all_reduce(
    lhs: jax.Array, rhs: jax.Array, axis_name: AxisNames, *, out_dtype: jax.typing.DTypeLike
) -> jax.Array:
    """`all_reduce(lhs @ rhs)`."""
    return all_reduce(matmul(lhs, rhs).astype(out_dtype), axis_name)
