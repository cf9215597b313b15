"""Matmuls by XLA, as a model author would write them by hand.

A product is accumulated in float32 and rounded once.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from stretto.distributed.devices.axes import make_varying, varying_axes
from stretto.kernels.problem.machine import Machine


def accumulator_dtype(dtype: jax.typing.DTypeLike) -> jnp.dtype:
    """The type in which products of `dtype` are summed: of 32 bits, or wider like `dtype`."""
    dtype = jnp.dtype(dtype)
    if dtype.itemsize >= 4:
        return dtype
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.dtype(jnp.float32)
    return jnp.dtype(jnp.uint32 if jnp.issubdtype(dtype, jnp.unsignedinteger) else jnp.int32)


def matmul(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """`lhs @ rhs`, `[..., k] @ [k, n]`, in the type of `accumulator_dtype`."""
    return _contract(lhs, rhs, lhs.ndim - 1)


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
    if not lhs.size or not rhs.size:
        # XLA fails, or ends the process, where a `shard_map` reads but empty arrays (JAX 0.11.2).
        rows = lhs.shape[:lhs_dim] + lhs.shape[lhs_dim + 1 :]
        zeros = jnp.zeros((*rows, rhs.shape[1]), dtype)
        return make_varying(zeros, varying_axes(lhs) | varying_axes(rhs))
    if Machine.of_mesh().platform == "cpu":
        # XLA's CPU backend has no 16 bit product with a wider result where `vmap` makes a batch
        # of it (JAX 0.11.2). Products of 16 bit numbers are exact in float32 either way.
        wide = accumulator_dtype(lhs.dtype)
        lhs, rhs = lhs.astype(wide), rhs.astype(wide)
        return lax.dot_general(lhs, rhs, (((lhs_dim,), (0,)), ((), ()))).astype(dtype)
    return lax.dot_general(lhs, rhs, (((lhs_dim,), (0,)), ((), ())), preferred_element_type=dtype)


def sum_of_products(
    lhs: Sequence[jax.Array], rhs: Sequence[jax.Array], rhs_transposed: bool = False
) -> jax.Array:
    """The sum of all `lhs_i @ rhs_i`, in the type of `accumulator_dtype`."""
    pairs = zip(lhs, rhs, strict=True)
    products = [matmul(x, y.T if rhs_transposed else y) for x, y in pairs]
    return functools.reduce(jnp.add, products)
