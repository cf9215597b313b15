"""The operations through XLA's collectives: the reference, and `backend="xla"` on any platform.

They are what a model author would write by hand. A matmul accumulates in float32 and is rounded
once, to `out_dtype`; sums across devices are made in the type of the operand that is summed, so 16
bit sums are rounded at every hop (pass `out_dtype=jnp.float32` where that matters). The fused
kernels sum in float32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from stretto.distributed.axes import AxisNames
from stretto.kernels import dispatch, gloo

type Epilogue = Callable[[jax.Array], jax.Array]


def accumulator_dtype(dtype: jax.typing.DTypeLike) -> jnp.dtype:
    """The type in which products of `dtype` are summed: float32, or `dtype` where that is wider."""
    dtype = jnp.dtype(dtype)
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.promote_types(dtype, jnp.float32)
    return dtype


def matmul(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """`lhs @ rhs`, `[m, k] @ [k, n]`, in the type of `accumulator_dtype`."""
    return _contract(lhs, rhs, 1)


def matmul_of_columns(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """`lhs^T @ rhs`, of `[k, m]` and `[k, n]`, in the type of `accumulator_dtype`."""
    return _contract(lhs, rhs, 0)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _contract(lhs: jax.Array, rhs: jax.Array, lhs_dim: int) -> jax.Array:
    """The product over dimension `lhs_dim` of lhs and the first one of rhs.

    JAX would make of its derivatives products of a float32 and a 16 bit matrix, which XLA widens
    to two of float32: half as fast, or worse. These are of two 16 bit ones, as the fused kernels'.
    """
    return _dot(lhs, rhs, lhs_dim, accumulator_dtype(lhs.dtype))


@_contract.defjvp
def _contract_jvp(lhs_dim, primals, tangents):
    lhs, rhs = primals
    lhs_dot, rhs_dot = tangents
    wide = accumulator_dtype(lhs.dtype)
    narrow = functools.partial(_dot, lhs_dim=lhs_dim, dtype=lhs.dtype)
    out_dot = narrow(lhs_dot, rhs).astype(wide) + narrow(lhs, rhs_dot).astype(wide)
    return _contract(lhs, rhs, lhs_dim), out_dot


def _dot(lhs: jax.Array, rhs: jax.Array, lhs_dim: int, dtype: jnp.dtype) -> jax.Array:
    """The product in `dtype`, summed in the type of `accumulator_dtype`."""
    if dispatch.platform_of_mesh()[0] == "cpu":
        # XLA's CPU backend has no 16 bit product with a wider result where `vmap` makes a batch
        # of it (JAX 0.11.2). Products of 16 bit numbers are exact in float32 either way.
        wide = accumulator_dtype(lhs.dtype)
        lhs, rhs = lhs.astype(wide), rhs.astype(wide)
        return lax.dot_general(lhs, rhs, (((lhs_dim,), (0,)), ((), ()))).astype(dtype)
    return lax.dot_general(lhs, rhs, (((lhs_dim,), (0,)), ((), ())), preferred_element_type=dtype)


def all_gather(x: jax.Array, axis_name: AxisNames, *, axis: int) -> jax.Array:
    """Concatenation along `axis` of every device's `x`."""
    if not x.size:  # XLA refuses to move nothing.
        return jnp.concatenate([x] * lax.axis_size(axis_name), axis)
    if gloo.connects_devices():
        return gloo.all_gather(x, axis_name, axis=axis)
    return lax.all_gather(x, axis_name, axis=axis, tiled=True)


def reduce_scatter(x: jax.Array, axis_name: AxisNames, *, axis: int) -> jax.Array:
    """This device's part along `axis` of the sum of every device's `x`."""
    if not x.size:
        return lax.slice_in_dim(x, 0, x.shape[axis] // lax.axis_size(axis_name), axis=axis)
    if gloo.connects_devices():
        return gloo.reduce_scatter(x, axis_name, axis=axis)
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
    rhs: Sequence[jax.Array],
    axis_name: AxisNames,
    *,
    epilogue: Epilogue | None,
    out_dtype: jax.typing.DTypeLike,
    rhs_transposed: bool = False,
    gather_axis: str = "m",
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """`epilogue(lhs @ x)` for each `x` of rhs, one of both gathered, and what was gathered.

    lhs is gathered along its rows ("m") or columns ("k"), or the only `x` along its columns ("n").
    """
    if gather_axis == "n":
        (part,), axis = rhs, 0 if rhs_transposed else 1
    else:
        part, axis = lhs, 0 if gather_axis == "m" else 1
    gathered = checkpoint_name(all_gather(part, axis_name, axis=axis), "gathered")
    lhs, rhs = (lhs, (gathered,)) if gather_axis == "n" else (gathered, rhs)
    outs = (matmul(lhs, x.T if rhs_transposed else x) for x in rhs)
    outs = (out if epilogue is None else epilogue(out) for out in outs)
    return tuple(out.astype(out_dtype) for out in outs), gathered


def matmul_reduce_scatter(
    lhs: Sequence[jax.Array],
    rhs: Sequence[jax.Array],
    axis_name: AxisNames,
    *,
    out_dtype: jax.typing.DTypeLike,
    rhs_transposed: bool = False,
) -> jax.Array:
    """`reduce_scatter(sum of lhs_i @ rhs_i)`, along the rows."""
    product = sum_of_products(lhs, rhs, rhs_transposed)
    return reduce_scatter(product.astype(out_dtype), axis_name, axis=0)


def matmul_all_reduce(
    lhs: Sequence[jax.Array],
    rhs: Sequence[jax.Array],
    axis_name: AxisNames,
    *,
    out_dtype: jax.typing.DTypeLike,
    rhs_transposed: bool = False,
) -> jax.Array:
    """`all_reduce(sum of lhs_i @ rhs_i)`."""
    return all_reduce(sum_of_products(lhs, rhs, rhs_transposed).astype(out_dtype), axis_name)


def sum_of_products(
    lhs: Sequence[jax.Array], rhs: Sequence[jax.Array], rhs_transposed: bool = False
) -> jax.Array:
    """The sum of all `lhs_i @ rhs_i`, in the type of `accumulator_dtype`."""
    pairs = zip(lhs, rhs, strict=True)
    products = [matmul(x, y.T if rhs_transposed else y) for x, y in pairs]
    return functools.reduce(jnp.add, products)
