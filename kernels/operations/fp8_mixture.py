"""`stretto.fp8.mixture_of_experts`: a layer of experts whose products, and moves to them, are in 8 bits."""  # noqa: E501

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from stretto.distributed.devices.axes import AxisNames, axis_size, canonical_axes
from stretto.kernels.operations import expert_checks, fp8_weights, mixture
from stretto.kernels.operations import fp8_mixture_rules as rules
from stretto.kernels.operations.fp8_products import HYBRID, Recipe, check_recipe
from stretto.kernels.operations.fp8_weights import Weight
from stretto.kernels.operations.mixture_steps import Operands
from stretto.kernels.operations.scaled import alike
from stretto.kernels.problem import activations, checks
from stretto.kernels.problem.numpy_arrays import takes_numpy_arrays
from stretto.kernels.problem.promotion import by_default_rules
from stretto.kernels.problem.routing import Routing
from stretto.kernels.xla.routing import route

OP = "fp8.mixture_of_experts"


@takes_numpy_arrays
@by_default_rules
def mixture_of_experts(
    x: jax.Array,
    expert_index: jax.Array,
    weights: jax.Array,
    w_in: Weight | tuple[Weight, Weight],
    w_out: Weight,
    axis_name: AxisNames,
    *,
    recipe: Recipe = HYBRID,
    activation: Callable[..., jax.Array] | str | None = None,
    b_in: Any = None,
    b_out: jax.Array | None = None,
    capacity: int | None = None,
    wire_dtype: jax.typing.DTypeLike | None = None,
    backend: str = "auto",
) -> tuple[jax.Array, Routing]:
    """`out[t] = sum_j weights[t, j] * expert_j(x[t])` in 8 bits, inside `jax.shard_map`.

    As `stretto.mixture_of_experts`, and differentiable in reverse. Tokens are quantised before they
    are sent, and cross the links in 8 bits, their scales beside them: a scale a row, or one for
    each 128 of its elements. Between its two products an expert's hidden rows are quantised anew.
    Results come back in `wire_dtype`, and are added up as `stretto.expert_combine` does it. In the
    backward pass cotangents are sent likewise, in `recipe.bwd_qtype`.

    Args:
      x, expert_index, weights, capacity, wire_dtype, backend: as there.
      w_in, w_out: as there, in any floating-point type; or each as `recipe.weight` returns it, in 8
        bits and transposed, `[e, f, d]` and `[e, d, f]` with its scales: made once, for weights
        that do not change. Then there is no derivative.
      axis_name: mesh axis, or tuple of axes, that the experts lie along.
      recipe: how operands are quantised.
      activation, b_in, b_out: as there; in float32.

    Returns:
      (out, routing), as there; out is of x's type.

    Raises:
      ValueError: as `stretto.mixture_of_experts`; some weights are in 8 bits and others not.

    Memory: rows are kept for the backward pass in 8 bits, with their scales. With
    `recipe.bwd_qtype=None` they are not: the backward pass sends x again, in its own type.
    """
    axes = canonical_axes(axis_name)
    devices = axis_size(axes)
    check_recipe(OP, recipe)
    checks.check_array(OP, "x", x)
    sides, _ = fp8_weights.as_sides(OP, "w_in", w_in)
    biases = None if b_in is None else checks.as_matrices(OP, "b_in", b_in)
    named = (*(("w_in", w) for w in sides), ("w_out", w_out))
    likes = [fp8_weights.like(OP, name, w, x.dtype) for name, w in named]
    num_experts = expert_checks.check_num_experts(OP, likes[-1], devices)
    rows = expert_checks.check_routing(OP, x, expert_index, num_experts, capacity, devices)
    gated = mixture.check_matrices(
        OP, x, weights, expert_index, tuple(likes[:-1]), likes[-1], biases, b_out
    )
    routing = route(expert_index, axes, num_experts=num_experts, rows=rows)
    layer = rules.Layer(
        recipe=recipe,
        axes=axes,
        rows=rows,
        num_experts=num_experts,
        dtype=x.dtype,
        wire_dtype=checks.check_out_dtype(OP, wire_dtype, x.dtype, "wire_dtype"),
        activation=activations.of_experts(OP, activation, gated=gated),
        gated=gated,
        backend=backend,
    )
    given = Operands(
        x, routing.positions, routing.group_sizes, weights, sides, w_out, biases, b_out
    )
    if 0 in expert_index.shape:
        return given.of_no_choice(axes), routing
    operands = alike(given, axes)
    if not fp8_weights.in_8_bits(OP, dict(w_in=sides, w_out=[w_out])):
        return rules.differentiable(layer, operands), routing
    return fp8_weights.once(OP, lambda xs: rules.output(layer, xs), operands), routing
