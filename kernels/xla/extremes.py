"""Maxima and minima over devices, with the derivative that `lax.pmax` lacks."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from stretto.distributed.devices.axes import AxisNames


def extreme(x: jax.Array, axis_name: AxisNames, op: str) -> jax.Array:
    """The largest (`op` "max") or smallest ("min") of every device's `x`, element by element."""
    return _extreme(x, axis_name, op)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _extreme(x: jax.Array, axis_name: AxisNames, op: str) -> jax.Array:
    return (lax.pmax if op == "max" else lax.pmin)(x, axis_name)


@_extreme.defjvp
def _extreme_jvp(axis_name, op, primals, tangents):
    """The tangent of the device that has it; several that do share it, as in `jnp.max`."""
    (x,), (x_dot,) = primals, tangents
    out = _extreme(x, axis_name, op)
    has = (x == out).astype(x_dot.dtype)
    return out, lax.psum(jnp.where(x == out, x_dot, 0) / lax.psum(has, axis_name), axis_name)
