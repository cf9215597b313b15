"""`stretto.fp8`: differentiable matmuls that quantise their operands themselves, for training.

`Recipe` selects types and scales. Operands are in float32 or bfloat16. They are quantised by scales of
their own current values ("current scaling"), and each product of a step has operands in 8 bits:

| product | quantised along | operands |
|---|---|---|
| `out = x @ w` | features in | x `act_qtype`, w `weight_qtype`, a transposed copy |
| `dx = g @ w^T` | features out | g `bwd_qtype`, w `weight_qtype`, as it lies |
| `dw = x^T @ g` | tokens | transposed copies of both; in bfloat16 for "block", for groups and without `bwd_qtype` |

Forward mode and derivatives of derivatives are XLA's, of the products without rounding
(`straight_through`). The copies are made by XLA in the passes that quantise. The names `act_qtype`, `weight_qtype` and
`bwd_qtype` are qwix's. float8_e4m3fn forward and float8_e5m2 backward is TransformerEngine's
`Format.HYBRID`; "block" with float8_e4m3fn for all operands is DeepSeek-V3's recipe.
"""  # noqa: E501

from __future__ import annotations

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
from stretto.kernels.operations import batches, fp8_weights, matmuls, straight_through
from stretto.kernels.operations import fp8_products as products
from stretto.kernels.operations.fp8_groups import grouped_matmul
from stretto.kernels.operations.fp8_mixture import mixture_of_experts
from stretto.kernels.operations.fp8_products import HYBRID, How, Matrices, Recipe
from stretto.kernels.operations.fp8_weights import Weight
from stretto.kernels.operations.scaled import alike
from stretto.kernels.operations.straight_through import Rules
from stretto.kernels.problem import checks
from stretto.kernels.problem.numpy_arrays import takes_numpy_arrays
from stretto.kernels.problem.promotion import by_default_rules
from stretto.kernels.xla import collectives
from stretto.kernels.xla.matmul import matmul as wide_matmul

type Pair = tuple[jax.Array, jax.Array]

__all__ = [
    "Recipe",
    "all_gather_matmul",
    "grouped_matmul",
    "matmul",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "mixture_of_experts",
]


@takes_numpy_arrays
@by_default_rules
def all_gather_matmul(
    x: jax.Array,
    w: Weight | Sequence[Weight],
    axis_name: AxisNames,
    *,
    recipe: Recipe = HYBRID,
    axis: int = 0,
    out_dtype: jax.typing.DTypeLike | None = None,
    backend: str = "auto",
) -> Any:
    """`all_gather(x) @ w` in 8 bits, inside `jax.shard_map`; differentiable.

    Per device x is `[..., k]`, gathered along `axis`, and w `[k, n]`, or a tuple of such matrices,
    as for `stretto.all_gather_matmul`. Values and scales of x are gathered. Those of the device's
    own x are kept for the backward pass, which gathers them again.

    Args:
      x: floating-point.
      w: the weights, as the optimiser has them; or each as `recipe.weight` returns it, in 8 bits
        and transposed, `[n, k]` with its scales: made once, for weights that do not change. Then
        there is no derivative.
      axis_name, axis, backend: as for `stretto.all_gather_matmul`.
      recipe: how operands are quantised.
      out_dtype: of the result; x's by default.

    Raises:
      ValueError: as `stretto.all_gather_matmul`.
    """
    axes, op = canonical_axes(axis_name), "fp8.all_gather_matmul"
    sides, several = fp8_weights.as_sides(op, "w", w)
    for side in sides:
        _check(op, x, side)
    axis = batches.checked_axis(op, axis, x)
    how = _how(op, x, recipe, out_dtype, axes=axes, axis=axis, backend=backend)
    outs = _product(op, GATHER, how, x, sides)
    return outs if several else outs[0]


@takes_numpy_arrays
@by_default_rules
def matmul_reduce_scatter(
    x: jax.Array,
    w: Weight,
    axis_name: AxisNames,
    *,
    recipe: Recipe = HYBRID,
    axis: int = 0,
    out_dtype: jax.typing.DTypeLike | None = None,
    backend: str = "auto",
) -> jax.Array:
    """`reduce_scatter(x @ w)` in 8 bits, inside `jax.shard_map`; differentiable.

    Per device x is `[..., k_shard]` and w `[k_shard, n]`. The products are summed over the devices
    in `out_dtype`, as by `stretto.matmul_reduce_scatter`.

    Args:
      x, w, recipe, out_dtype: as of `all_gather_matmul`.
      axis_name, axis, backend: as for `stretto.matmul_reduce_scatter`.

    Returns:
      This device's rows of the sum: x's shape with n columns, and `axis` divided by the devices.

    Raises:
      ValueError: as `stretto.matmul_reduce_scatter`.
    """
    axes, op = canonical_axes(axis_name), "fp8.matmul_reduce_scatter"
    _check(op, x, w)
    axis = batches.checked_axis(op, axis, x)
    checks.check_divisible(op, f"dimension {axis}", x.shape[axis], axis_size(axes))
    how = _how(op, x, recipe, out_dtype, axes=axes, axis=axis, backend=backend)
    return _product(op, REDUCE, how, x, w)


@takes_numpy_arrays
@by_default_rules
def matmul_all_reduce(
    x: jax.Array,
    w: Weight,
    axis_name: AxisNames,
    *,
    recipe: Recipe = HYBRID,
    out_dtype: jax.typing.DTypeLike | None = None,
    backend: str = "auto",
) -> jax.Array:
    """`all_reduce(x @ w)` in 8 bits, inside `jax.shard_map`; differentiable.

    Per device x is `[..., k_shard]` and w `[k_shard, n]`; the sum, on every device, is `[..., n]`.

    Args:
      x, w, axis_name, recipe, out_dtype, backend: as of `matmul_reduce_scatter`.

    Raises:
      ValueError: as `stretto.matmul_all_reduce`.
    """
    axes, op = canonical_axes(axis_name), "fp8.matmul_all_reduce"
    _check(op, x, w)
    how = _how(op, x, recipe, out_dtype, axes=axes, backend=backend)
    return _product(op, REDUCE, how, x, w)


@takes_numpy_arrays
@by_default_rules
def matmul(
    x: jax.Array,
    w: Weight,
    *,
    recipe: Recipe = HYBRID,
    out_dtype: jax.typing.DTypeLike | None = None,
) -> jax.Array:
    """`x @ w` in 8 bits on one device, by XLA; x `[..., k]`, w `[k, n]`; differentiable.

    Args:
      x, w, recipe, out_dtype: as of `all_gather_matmul`.

    Raises:
      ValueError: operands that do not fit each other.
    """
    op = "fp8.matmul"
    _check(op, x, w)
    how = _how(op, x, recipe, out_dtype)
    return _product(op, ALONE, how, x, w)


def _how(op: str, x: jax.Array, recipe: Recipe, out_dtype: Any, **more: Any) -> How:
    if not isinstance(recipe, Recipe):
        raise ValueError(f"{op}: recipe={recipe!r:.60} must be a stretto.fp8.Recipe.")
    dtype = checks.check_out_dtype(op, out_dtype, x.dtype)
    return How(recipe=recipe, out_dtype=dtype, typed=bool(varying_axes(x)), **more)


def _check(op: str, x: Any, w: Any) -> None:
    """Raises ValueError unless `x @ w` multiplies matrices; w may be in 8 bits with scales."""
    checks.check_array(op, "x", x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"{op}: x is {x.dtype}; it must be floating-point. Cast it.")
    like = fp8_weights.like(op, "w", w, x.dtype)
    checks.check_matmul_operands(op, x, like, batches=True, scaled=True)


def _product(op: str, rules: Rules, how: How, x: jax.Array, w: Weight | tuple[Weight, ...]) -> Any:
    """The product of `rules`; of weights that were quantised before it has no derivative."""
    operands = alike((x, w), how.axes)
    sides, _ = fp8_weights.as_sides(op, "w", w)
    if not fp8_weights.in_8_bits(op, dict(w=sides)):
        return straight_through.product(rules, how, operands)
    return fp8_weights.once(op, lambda given: rules.forward(how, given)[0], operands)


# --- All-gather matmul ----------------------------------------------------------------------------


def _gather_forward(how: How, operands: tuple[jax.Array, Matrices]) -> tuple[Matrices, Any]:
    (x, ws), recipe = operands, how.recipe
    values = recipe.quantised(x, recipe.act_qtype, -1)
    weights = [fp8_weights.as_quantised(recipe, w) for w in ws]
    outs = products.scaled_gather(how, values, weights, how.out_dtype)
    return outs, products.kept(recipe, x, values)


def _gather_backward(
    how: How, operands: tuple[jax.Array, Matrices], residuals: Any, bars: Matrices
) -> tuple[jax.Array, Matrices]:
    """Weights and gradients of several products are joined: one product makes dx."""
    (_, ws), (kept, like), recipe = operands, residuals, how.recipe
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


def _gather_wide(how: How, operands: tuple[jax.Array, Matrices]) -> Matrices:
    x, ws = products.unrounded(*operands)
    whole = collectives.all_gather(x, how.axes, axis=how.token_axis)
    return tuple(wide_matmul(whole, w).astype(how.out_dtype) for w in ws)


GATHER = Rules(forward=_gather_forward, backward=_gather_backward, wide=_gather_wide)


# --- Sums over the devices ------------------------------------------------------------------------


def _reduce_forward(how: How, operands: Pair) -> tuple[jax.Array, Any]:
    (x, w), recipe = operands, how.recipe
    values = recipe.quantised(x, recipe.act_qtype, -1)
    out = products.scaled_reduce(how, values, fp8_weights.as_quantised(recipe, w), how.out_dtype)
    return out, products.kept(recipe, x, values)


def _reduce_backward(how: How, operands: Pair, residuals: Any, bar: jax.Array) -> Pair:
    (_, w), (kept, like), recipe = operands, residuals, how.recipe
    if how.axis is None:
        # The cotangent of a replicated sum: without types, each device has a share of it.
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


def _reduce_wide(how: How, operands: Pair) -> jax.Array:
    product = _alone_wide(how, operands)
    if how.axis is None:
        return collectives.all_reduce(product, how.axes)
    return collectives.reduce_scatter(product, how.axes, axis=how.axis)


REDUCE = Rules(forward=_reduce_forward, backward=_reduce_backward, wide=_reduce_wide)


# --- One device -----------------------------------------------------------------------------------


def _alone_forward(how: How, operands: Pair) -> tuple[jax.Array, Any]:
    (x, w), recipe = operands, how.recipe
    values = recipe.quantised(x, recipe.act_qtype, -1)
    out = products.product(values, fp8_weights.as_quantised(recipe, w)).astype(how.out_dtype)
    return out, products.kept(recipe, x, values)


def _alone_backward(how: How, operands: Pair, residuals: Any, bar: jax.Array) -> Pair:
    (_, w), (kept, like) = operands, residuals
    dx = products.times_transposed(how.recipe, bar, w, like.dtype)
    dw = products.weight_gradient(how.recipe, products.wide(kept, like.dtype), bar)
    return dx, dw.astype(w.dtype)


def _alone_wide(how: How, operands: Pair) -> jax.Array:
    x, (w,) = products.unrounded(operands[0], operands[1:])
    return wide_matmul(x, w).astype(how.out_dtype)


ALONE = Rules(forward=_alone_forward, backward=_alone_backward, wide=_alone_wide)
