"""`all_reduce_rms_norm` by XLA, by a kernel, and its derivative."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from stretto.distributed.devices.axes import make_varying, varying_axes
from stretto.distributed.team import Team
from stretto.kernels.operation import Axes, Call
from stretto.kernels.operations.perform import cotangent_of_replicated, run, typed_alike
from stretto.kernels.problem.epilogue import at_least_float32
from stretto.kernels.xla import collectives

type Operands = tuple[jax.Array, jax.Array, jax.Array]
type Results = tuple[jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Of the norm: `epsilon` is added to the mean square; an array if it is known at run time."""

    epsilon: Any


def rms_norm(h: jax.Array, weight: jax.Array, epsilon: float, dtype: Any) -> jax.Array:
    """`h / sqrt(mean(h ** 2) + epsilon) * weight`, row by row, in float32 at least."""
    wide = at_least_float32(h.dtype)
    h, weight = h.astype(wide), weight.astype(wide)
    scale = lax.rsqrt(jnp.mean(h * h, axis=1, keepdims=True) + jnp.asarray(epsilon, wide))
    return (h * scale * weight).astype(dtype)


def _added(residual: jax.Array, total: jax.Array) -> jax.Array:
    wide = at_least_float32(residual.dtype)
    return (residual.astype(wide) + total.astype(wide)).astype(residual.dtype)


def reference(operands: Operands, axes: Axes, options: Options) -> Results:
    """Through `lax.psum`."""
    x, residual, weight = operands
    h = _added(residual, collectives.all_reduce(x, axes))
    return h, rms_norm(h, weight, options.epsilon, x.dtype)


def perform(operands: Operands, call: Call) -> Results:
    """The kernel's results, of operands typed as it takes them.

    x varies over the team's axes. The others do not, so that their cotangents, which all devices
    have, are not added up over them; over other axes all are typed alike.
    """
    others = frozenset().union(*map(varying_axes, operands)) - set(call.axes)
    x, residual, weight = (make_varying(one, others) for one in operands)
    typed = bool(varying_axes(make_varying(x, call.axes)))
    operands = make_varying(x, call.axes), residual, weight
    return run(operands, dataclasses.replace(call, typed=typed))


def launch(kernel: Callable[..., Results], operands: Operands, call: Call) -> Results:
    """The results of one of the two kernels."""
    x, residual, weight = typed_alike(call.axes, operands)
    return kernel(
        *(x, residual, weight, Team.along(call.axes)),
        epsilon=call.options.epsilon,
        config=call.config,
        interpret=call.interpret,
    )


def forward(operands: Operands, call: Call) -> tuple[Results, Any]:
    """The results, and what the derivative needs: h, weight, a number of x's type."""
    x, _, weight = operands
    h, out = run(operands, call)
    return (h, out), (h, weight, jnp.zeros((), x.dtype))


def tangent(call: Call, residuals: Any, dots: Operands) -> Results:
    """By XLA: of the sum, and of the norm."""
    h, weight, like_x = residuals
    x_dot, residual_dot, weight_dot = dots
    h_dot = _added(residual_dot, collectives.all_reduce(x_dot, call.axes))
    norm = functools.partial(rms_norm, epsilon=call.options.epsilon, dtype=like_x.dtype)
    return h_dot, jax.jvp(norm, (h, weight), (h_dot, weight_dot))[1]


def backward(call: Call, residuals: Any, bars: Results) -> Operands:
    """Every device has the cotangents of h and of the rows; those of h are x's as well."""
    h, weight, like_x = residuals
    norm = functools.partial(rms_norm, epsilon=call.options.epsilon, dtype=like_x.dtype)
    h_bar, weight_bar = jax.vjp(norm, h, weight)[1](bars[1])
    h_bar = _added(bars[0], h_bar)
    return cotangent_of_replicated(call, h_bar.astype(like_x.dtype)), h_bar, weight_bar
