"""Products of groups of rows by XLA, differentiable to any order and under any `vmap`.

`lax.ragged_dot` has neither (JAX 0.11.2): no derivative of a sum over a group's rows, and no batch
of both operands. The two products here are each other's derivatives, and of a batch one is computed
after the other. Of 16 bit operands derivatives are products of 16 bit ones, as the kernels'.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from stretto.distributed.devices.axes import make_varying, varying_axes
from stretto.distributed.primitives.batching import mapped
from stretto.kernels.problem.promotion import by_default_rules
from stretto.kernels.xla.matmul import accumulator_dtype

type Operands = tuple[jax.Array, jax.Array, jax.Array]

OF_ROWS = lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), [0], [0])
OVER_ROWS = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])


def product(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
    """`out[r] = lhs[r] @ rhs[group of r]`, `[m, k]` and `[g, k, n]` -> `[m, n]`.

    `sizes` `[g]` are the rows of each group, at most m in all; rows of none are zero. The result
    has the type of `accumulator_dtype`.
    """
    return _of_rows(*_typed_alike(lhs, rhs, sizes))


def contraction(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
    """`out[g] = lhs^T @ rhs` over the rows of group g, `[m, k]` and `[m, n]` -> `[g, k, n]`."""
    return _over_rows(*_typed_alike(lhs, rhs, sizes))


def _typed_alike(*operands: jax.Array) -> Iterator[jax.Array]:
    """So that the sum over devices, of which a cotangent is one, follows outside."""
    varying = frozenset().union(*map(varying_axes, operands))
    return (make_varying(x, varying) for x in operands)


@jax.custom_jvp
def _of_rows(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
    return _mapped(_product, (lhs, rhs, sizes), _transpose_of_product)


@jax.custom_jvp
def _over_rows(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
    return _mapped(_contraction, (lhs, rhs, sizes), _transpose_of_contraction)


@by_default_rules
def _product(operands: Operands) -> jax.Array:
    lhs, rhs, sizes = operands
    wide = accumulator_dtype(lhs.dtype)
    if 0 in lhs.shape or 0 in rhs.shape:
        return jnp.zeros((lhs.shape[0], rhs.shape[2]), wide)
    out = lax.ragged_dot_general(lhs, rhs, sizes, OF_ROWS, preferred_element_type=wide)
    return jnp.where((jnp.arange(lhs.shape[0]) < jnp.sum(sizes))[:, None], out, 0)


@by_default_rules
def _contraction(operands: Operands) -> jax.Array:
    lhs, rhs, sizes = operands
    wide = accumulator_dtype(lhs.dtype)
    if 0 in lhs.shape or 0 in rhs.shape or 0 in sizes.shape:
        return jnp.zeros((sizes.shape[0], lhs.shape[1], rhs.shape[1]), wide)
    return lax.ragged_dot_general(lhs, rhs, sizes, OVER_ROWS, preferred_element_type=wide)


def _mapped(fun: Any, operands: Operands, transpose: Any) -> jax.Array:
    def one_by_one(size: int, batched: Any, operands: Operands) -> jax.Array:
        every = [
            x if has else jnp.broadcast_to(x, (size, *x.shape))
            for x, has in zip(operands, batched, strict=True)
        ]
        return lax.map(lambda one: _mapped(fun, one, transpose), tuple(every))

    return mapped(fun, one_by_one, operands, transpose)


def _transpose_of_product(operands: Operands, bar: jax.Array) -> tuple[Any, Any, None]:
    lhs, rhs, sizes = operands
    bar = bar.astype(lhs.dtype)
    lhs_bar = product(bar, rhs.swapaxes(1, 2), sizes)
    return lhs_bar.astype(lhs.dtype), contraction(lhs, bar, sizes).astype(rhs.dtype), None


def _transpose_of_contraction(operands: Operands, bar: jax.Array) -> tuple[Any, Any, None]:
    lhs, rhs, sizes = operands
    bar = bar.astype(lhs.dtype)
    lhs_bar = product(rhs, bar.swapaxes(1, 2), sizes)
    return lhs_bar.astype(lhs.dtype), product(lhs, bar, sizes).astype(rhs.dtype), None


def _jvp_of(fun: Any) -> Any:
    def jvp(primals: Operands, tangents: Any) -> tuple[jax.Array, jax.Array]:
        (lhs, rhs, sizes), (lhs_dot, rhs_dot, _) = primals, tangents
        out = fun(lhs, rhs, sizes)
        narrow, dots = lhs.dtype, []
        if not isinstance(lhs_dot, SymbolicZero):
            dots.append(fun(lhs_dot, rhs, sizes).astype(narrow))
        if not isinstance(rhs_dot, SymbolicZero):
            dots.append(fun(lhs, rhs_dot, sizes).astype(narrow))
        return out, sum((dot.astype(out.dtype) for dot in dots), jnp.zeros_like(out))

    return jvp


_of_rows.defjvp(_jvp_of(_of_rows), symbolic_zeros=True)
_over_rows.defjvp(_jvp_of(_over_rows), symbolic_zeros=True)
