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
    varying_axes,
)
from stretto.kernels.operations import batches, fp8_weights, straight_through
from stretto.kernels.operations.fp8_groups import grouped_matmul
from stretto.kernels.operations.fp8_matmul_rules import ALONE, GATHER, REDUCE
from stretto.kernels.operations.fp8_mixture import mixture_of_experts
from stretto.kernels.operations.fp8_products import HYBRID, How, Recipe, check_recipe
from stretto.kernels.operations.fp8_weights import Weight
from stretto.kernels.operations.scaled import alike
from stretto.kernels.operations.straight_through import Rules
from stretto.kernels.problem import checks
from stretto.kernels.problem.numpy_arrays import takes_numpy_arrays
from stretto.kernels.problem.promotion import by_default_rules

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
    check_recipe(op, recipe)
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
