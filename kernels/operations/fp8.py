"""`stretto.fp8`: differentiable matmuls that quantise their operands themselves, for training.

`Recipe` says how. Operands come in as they are (weights in float32 or bfloat16 are not touched), are
scaled by their own numbers ("current scaling"), and each product of a step is one of 8 bits:

| product | quantised along | operands |
|---|---|---|
| `out = x @ w` | features in | x `act_qtype`, w `weight_qtype`, a transposed copy |
| `dx = g @ w^T` | features out | g `bwd_qtype`, w `weight_qtype`, as it lies |
| `dw = x^T @ g` | tokens | transposed copies of both; in bfloat16 for "block", for groups and without `bwd_qtype` |

The copies are made by XLA in the passes that quantise. The names `act_qtype`, `weight_qtype` and
`bwd_qtype` are qwix's. float8_e4m3fn forward and float8_e5m2 backward is TransformerEngine's
`Format.HYBRID`; "block" with float8_e4m3fn for all is DeepSeek-V3's recipe.
"""  # noqa: E501

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from stretto.distributed.devices.axes import (
    AxisNames,
    axis_size,
    canonical_axes,
    make_varying,
    varying_axes,
)
from stretto.kernels.operations import batches, matmuls
from stretto.kernels.operations import fp8_products as products
from stretto.kernels.operations.fp8_groups import grouped_matmul
from stretto.kernels.operations.fp8_mixture import mixture_of_experts
from stretto.kernels.operations.fp8_products import HYBRID, How, Matrices, Recipe
from stretto.kernels.operations.perform import typed_alike
from stretto.kernels.problem import checks
from stretto.kernels.xla import collectives

__all__ = [
    "Recipe",
    "all_gather_matmul",
    "grouped_matmul",
    "matmul",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "mixture_of_experts",
]


def all_gather_matmul(
    x: jax.Array,
    w: jax.Array | Sequence[jax.Array],
    axis_name: AxisNames,
    *,
    recipe: Recipe = HYBRID,
    axis: int = 0,
    out_dtype: jax.typing.DTypeLike | None = None,
    backend: str = "auto",
) -> Any:
    """`all_gather(x) @ w` in 8 bits, inside `jax.shard_map`; differentiable in reverse.

    Per device x `[..., k]`, gathered along `axis`, and w `[k, n]`, or several in a tuple; as
    `stretto.all_gather_matmul` has them. Values and scales of x are gathered. The backward pass
    keeps those of the device's own x, and gathers them again.

    Args:
      x: floating-point.
      w: the weights, as the optimiser has them.
      axis_name, axis, backend: as for `stretto.all_gather_matmul`.
      recipe: how operands are quantised.
      out_dtype: of the result; x's by default.

    Raises:
      ValueError: as `stretto.all_gather_matmul`.
    """
    axes, op = canonical_axes(axis_name), "fp8.all_gather_matmul"
    several = isinstance(w, tuple | list)
    sides = checks.as_matrices(op, "w", w)
    for side in sides:
        checks.check_matmul_operands(op, x, side, batches=True, scaled=True)
    axis = batches.checked_axis(op, axis, x)
    how = _how(op, x, recipe, out_dtype, axes=axes, axis=axis, backend=backend)
    x, *sides = typed_alike(axes, [x, *sides])
    outs: Any = _gather(how, x, tuple(sides))
    return outs if several else outs[0]


def matmul_reduce_scatter(
    x: jax.Array,
    w: jax.Array,
    axis_name: AxisNames,
    *,
    recipe: Recipe = HYBRID,
    axis: int = 0,
    out_dtype: jax.typing.DTypeLike | None = None,
    backend: str = "auto",
) -> jax.Array:
    """`reduce_scatter(x @ w)` in 8 bits, inside `jax.shard_map`; differentiable in reverse.

    Per device x `[..., k_shard]` and w `[k_shard, n]`. The products are summed over the devices in
    `out_dtype`, as `stretto.matmul_reduce_scatter` does it. Arguments and errors are those of
    `all_gather_matmul`.
    """
    axes, op = canonical_axes(axis_name), "fp8.matmul_reduce_scatter"
    checks.check_matmul_operands(op, x, w, batches=True, scaled=True)
    axis = batches.checked_axis(op, axis, x)
    checks.check_divisible(op, f"dimension {axis}", x.shape[axis], axis_size(axes))
    how = _how(op, x, recipe, out_dtype, axes=axes, axis=axis, backend=backend)
    return _reduce(how, *typed_alike(axes, [x, w]))


def matmul_all_reduce(
    x: jax.Array,
    w: jax.Array,
    axis_name: AxisNames,
    *,
    recipe: Recipe = HYBRID,
    out_dtype: jax.typing.DTypeLike | None = None,
    backend: str = "auto",
) -> jax.Array:
    """`all_reduce(x @ w)` in 8 bits; arguments are those of `matmul_reduce_scatter`."""
    axes, op = canonical_axes(axis_name), "fp8.matmul_all_reduce"
    checks.check_matmul_operands(op, x, w, batches=True, scaled=True)
    how = _how(op, x, recipe, out_dtype, axes=axes, backend=backend)
    return _reduce(how, *typed_alike(axes, [x, w]))


def matmul(
    x: jax.Array,
    w: jax.Array,
    *,
    recipe: Recipe = HYBRID,
    out_dtype: jax.typing.DTypeLike | None = None,
) -> jax.Array:
    """`x @ w` in 8 bits on one device, by XLA; x `[..., k]`, w `[k, n]`; differentiable in reverse.

    Raises:
      ValueError: operands that do not fit each other.
    """
    op = "fp8.matmul"
    checks.check_matmul_operands(op, x, w, batches=True, scaled=True)
    return _alone(_how(op, x, recipe, out_dtype), *typed_alike((), [x, w]))


def _how(op: str, x: jax.Array, recipe: Recipe, out_dtype: Any, **more: Any) -> How:
    dtype = checks.check_out_dtype(op, out_dtype, x.dtype)
    return How(recipe=recipe, out_dtype=dtype, typed=bool(varying_axes(x)), **more)


# --- All-gather matmul ----------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather(how: How, x: jax.Array, ws: Matrices) -> Matrices:
    return _gather_forward(how, x, ws)[0]


def _gather_forward(how: How, x: jax.Array, ws: Matrices) -> tuple[Matrices, Any]:
    recipe = how.recipe
    values = recipe.quantised(x, recipe.act_qtype, -1)
    weights = [recipe.weight(w) for w in ws]
    outs = products.scaled_gather(how, values, weights, how.out_dtype)
    return outs, (products.kept(recipe, x, values), ws)


def _gather_backward(how: How, residuals: Any, bars: Matrices) -> tuple[jax.Array, Matrices]:
    """Weights and gradients of several products are joined: one product makes dx."""
    (kept, like), ws = residuals
    recipe = how.recipe
    bar = jnp.concatenate(bars, axis=-1)
    w = jnp.concatenate(ws, axis=1)
    if recipe.bwd_qtype is None:
        bar = bar.astype(kept.dtype)
        dx = matmuls.matmul_reduce_scatter(
            bar,
            w.astype(kept.dtype),
            how.axes,
            rhs_transposed=True,
            axis=how.token_axis,
            backend=how.backend,
        )
    else:
        g = recipe.quantised(bar, recipe.bwd_qtype, -1)
        dx = products.scaled_reduce(how, g, products.as_it_lies(recipe, w), like.dtype)
    gathered = products.gathered(how, kept)
    dw = products.weight_gradient(recipe, gathered, bar)
    starts = [sum(x.shape[1] for x in ws[:i]) for i in range(1, len(ws))]
    parts = jnp.split(dw, starts, axis=1)
    return dx.astype(like.dtype), tuple(x.astype(w.dtype) for x, w in zip(parts, ws, strict=True))


_gather.defvjp(_gather_forward, _gather_backward)


# --- Sums over the devices ------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _reduce(how: How, x: jax.Array, w: jax.Array) -> jax.Array:
    return _reduce_forward(how, x, w)[0]


def _reduce_forward(how: How, x: jax.Array, w: jax.Array) -> tuple[jax.Array, Any]:
    recipe = how.recipe
    values = recipe.quantised(x, recipe.act_qtype, -1)
    out = products.scaled_reduce(how, values, recipe.weight(w), how.out_dtype)
    return out, (products.kept(recipe, x, values), w)


def _reduce_backward(how: How, residuals: Any, bar: jax.Array) -> tuple[jax.Array, jax.Array]:
    (kept, like), w = residuals
    recipe = how.recipe
    if how.axis is None:
        # A replicated sum's: where types do not say so, each device has a share of it.
        whole = make_varying(bar, how.axes) if how.typed else collectives.all_reduce(bar, how.axes)
        dx = products.times_transposed(recipe, whole, w, like.dtype)
        dw = products.weight_gradient(recipe, products.wide(kept, like.dtype), whole)
        return dx, dw.astype(w.dtype)
    if recipe.bwd_qtype is None:
        dx, gathered = matmuls.all_gather_matmul(
            bar.astype(kept.dtype),
            w.astype(kept.dtype),
            how.axes,
            rhs_transposed=True,
            axis=how.token_axis,
            return_gathered=True,
            backend=how.backend,
        )
    else:
        g = recipe.quantised(bar, recipe.bwd_qtype, -1)
        (dx,) = products.scaled_gather(how, g, [products.as_it_lies(recipe, w)], like.dtype)
        gathered = products.gathered(how, g)
    dw = products.weight_gradient(recipe, products.wide(kept, like.dtype), gathered)
    return dx.astype(like.dtype), dw.astype(w.dtype)


_reduce.defvjp(_reduce_forward, _reduce_backward)


# --- One device -----------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _alone(how: How, x: jax.Array, w: jax.Array) -> jax.Array:
    return _alone_forward(how, x, w)[0]


def _alone_forward(how: How, x: jax.Array, w: jax.Array) -> tuple[jax.Array, Any]:
    recipe = how.recipe
    values = recipe.quantised(x, recipe.act_qtype, -1)
    out = products.product(values, recipe.weight(w)).astype(how.out_dtype)
    return out, (products.kept(recipe, x, values), w)


def _alone_backward(how: How, residuals: Any, bar: jax.Array) -> tuple[jax.Array, jax.Array]:
    (kept, like), w = residuals
    dx = products.times_transposed(how.recipe, bar, w, like.dtype)
    dw = products.weight_gradient(how.recipe, products.wide(kept, like.dtype), bar)
    return dx, dw.astype(w.dtype)


_alone.defvjp(_alone_forward, _alone_backward)
