"""Products of groups of rows in 8 bits: `stretto.fp8.grouped_matmul`, and what experts have of it.

| product | quantised along | operands |
|---|---|---|
| `out[r] = x[r] @ w[group of r]` | features in | x `act_qtype`, w `weight_qtype`, a transposed copy |
| `dx[r] = g[r] @ w[group of r]^T` | features out | g `bwd_qtype`, w `weight_qtype`, as it lies |
| `dw[i] = x^T @ g` over the rows of group i | | in x's own type |

Tensor cores take operands in 8 bits along the contraction only. That of dw are a group's rows, any
number of them, whose transposed copies would begin wherever the group does: no main loop has that.
"""  # noqa: E501

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from stretto.distributed.devices.axes import varying_axes
from stretto.kernels.fused.group_tables import cut_off
from stretto.kernels.operations import fp8_products as products
from stretto.kernels.operations import fp8_weights, scaled_groups
from stretto.kernels.operations import grouped_matmul as plain
from stretto.kernels.operations.as_bits import from_bits, to_bits
from stretto.kernels.operations.fp8_products import HYBRID, How, Recipe
from stretto.kernels.operations.fp8_weights import Weight
from stretto.kernels.operations.scaled import alike, without_derivative
from stretto.kernels.problem import checks
from stretto.kernels.problem.numpy_arrays import takes_numpy_arrays
from stretto.kernels.problem.options import GroupedOptions
from stretto.kernels.problem.promotion import by_default_rules
from stretto.kernels.xla.quantisation import Quantised


@takes_numpy_arrays
@by_default_rules
def grouped_matmul(
    x: jax.Array,
    w: Weight,
    group_sizes: jax.Array,
    *,
    recipe: Recipe = HYBRID,
    out_dtype: jax.typing.DTypeLike | None = None,
    backend: str = "auto",
) -> jax.Array:
    """`out[r] = x[r] @ w[group of r]` in 8 bits, on one device; differentiable in reverse.

    x `[m, k]`, rows group by group, w `[g, k, n]` and group_sizes int32 `[g]`, as
    `stretto.grouped_matmul` has them. Rows of no group are zero, and have no part in a scale. With
    granularity "tensor" there is one scale for x, and one for each group's matrix.

    Args:
      x: floating-point.
      w: the weights, as the optimiser has them, of which the derivative is a product in x's type;
        or as `recipe.weight` returns them, in 8 bits and transposed, `[g, n, k]` with their scales:
        made once, for weights that do not change. Then there is no derivative.
      group_sizes, backend: as for `stretto.grouped_matmul`.
      recipe: how operands are quantised.
      out_dtype: of the result; x's by default.

    Raises:
      ValueError: as `stretto.grouped_matmul`.
    """
    op = "fp8.grouped_matmul"
    checks.check_array(op, "x", x)
    like = fp8_weights.like(op, "w", w, x.dtype)
    checks.check_grouped_operands(op, x, like, group_sizes, rhs_transposed=False, scaled=True)
    dtype = checks.check_out_dtype(op, out_dtype, x.dtype)
    how = How(recipe=recipe, out_dtype=dtype, backend=backend, typed=bool(varying_axes(x)))
    operands = alike((x, w, cut_off(group_sizes, x.shape[0])), ())
    if not fp8_weights.in_8_bits(op, dict(w=[w])):
        return _grouped(how, *operands)
    return fp8_weights.once(op, lambda given: _forward(how, *given)[0], operands)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped(how: How, x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
    return _forward(how, x, w, sizes)[0]


@by_default_rules
def _forward(how: How, x: jax.Array, w: Weight, sizes: jax.Array) -> tuple[jax.Array, Any]:
    recipe = how.recipe
    x = zero_beyond(x, sizes)
    values = recipe.quantised(x, recipe.act_qtype, -1)
    out = times(values, fp8_weights.as_quantised(recipe, w), sizes, how.out_dtype, how.backend)
    return out, (to_bits(products.kept(recipe, x, values)), w, sizes)


@by_default_rules
def _backward(how: How, residuals: Any, bar: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    (kept, like), w, sizes = from_bits(residuals)
    dx = times_transposed(how, zero_beyond(bar, sizes), w, sizes, like.dtype)
    dw = contracted(how, products.wide(kept, like.dtype), bar.astype(like.dtype), w, sizes)
    return dx, dw, None


def _refusing(rule: Callable[..., Any]) -> Callable[..., Any]:
    """A rule that is not differentiated itself: nothing would come through the rounding."""

    def whole(how: How, *given: Any) -> Any:
        run = lambda given: rule(how, *given)  # noqa: E731
        return without_derivative("fp8.grouped_matmul", run, given, instead=SECOND)

    return whole


SECOND = "for derivatives of derivatives call stretto.grouped_matmul"

_grouped.defvjp(_refusing(_forward), _refusing(_backward))


# --- The products, also of experts ----------------------------------------------------------------


def zero_beyond(x: jax.Array, sizes: jax.Array) -> jax.Array:
    """`x` with zeros in the rows of no group, so that one scale of all sees nothing of them."""
    used = jnp.arange(x.shape[0]) < jnp.sum(jnp.maximum(sizes, 0))
    return jnp.where(used[:, None], x, jnp.zeros((), x.dtype))


def times(
    lhs: Quantised,
    rhs: Quantised,
    sizes: jax.Array,
    dtype: Any,
    backend: str,
    *,
    zeros: bool = True,
) -> jax.Array:
    """`lhs[r] @ rhs[group of r]^T`, of rhs `[g, n, k]`, in `dtype`.

    Without `zeros` rows of no group are undefined.
    """
    options = GroupedOptions(out_dtype=jnp.dtype(dtype), rhs_transposed=True, zeros=zeros)
    return scaled_groups.grouped(
        plain.SCALED,
        (lhs.qvalue, rhs.qvalue, sizes.astype(jnp.int32)),
        plain.sizes_of(lhs.qvalue, rhs.qvalue, options),
        (lhs.scale, rhs.scale),
        options,
        config=None,
        backend=backend,
    )


def activated(
    lhs: Quantised,
    sides: Sequence[Quantised],
    sizes: jax.Array,
    dtype: Any,
    backend: str,
    activation: Callable[..., jax.Array],
    *,
    gated: bool,
) -> jax.Array | None:
    """The activation of `times` of each of `sides`, by the kernel that multiplies, in `dtype`.

    None where no kernel does both. Rows of no group are undefined.
    """
    options = GroupedOptions(out_dtype=jnp.dtype(dtype), rhs_transposed=True, zeros=False)
    return scaled_groups.activated(
        plain.SCALED,
        (lhs.qvalue, [x.qvalue for x in sides], sizes.astype(jnp.int32)),
        plain.sizes_of(lhs.qvalue, sides[0].qvalue, options),
        (lhs.scale, [x.scale for x in sides]),
        options,
        activation,
        gated=gated,
        backend=backend,
    )


def times_transposed(
    how: How, bar: jax.Array | Quantised, w: jax.Array, sizes: jax.Array, dtype: Any
) -> jax.Array:
    """`bar[r] @ w[group of r]^T`, of w `[g, k, n]`, as the recipe has it; in `dtype`."""
    recipe = how.recipe
    if isinstance(bar, Quantised):
        g = bar
    elif recipe.bwd_qtype is not None:
        g = recipe.quantised(bar, recipe.bwd_qtype, -1)
    else:
        wide = bar.astype(dtype), w.astype(dtype)
        return plain.grouped_matmul(*wide, sizes, rhs_transposed=True, backend=how.backend)
    return times(g, products.as_it_lies(recipe, w), sizes, dtype, how.backend)


def contracted(how: How, x: jax.Array, bar: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
    """`x^T @ bar` over the rows of each group, like `w`: its cotangent, multiplied in x's type."""

    def product(w: jax.Array) -> jax.Array:
        return plain.grouped_matmul(x, w, sizes, backend=how.backend)

    _, pull_back = jax.vjp(product, w.astype(x.dtype))
    return pull_back(bar)[0].astype(w.dtype)
