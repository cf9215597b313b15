"""Collectives on CPU devices that XLA connects through gloo, without gloo's reduce-scatter.

That one overwrites numbers which it is still sending, so results of some megabytes are wrong now
and then, without an error (jax-ml/jax#40830). With jaxlib 0.11.2, 15 of 40 runs on eight devices in
pairs were, each part 16 MiB; gloo's sum was right in 40 of 40. So a reduce-scatter is a sum here,
of which a device keeps its part, and so is the derivative of an all-gather, of which JAX would make
a reduce-scatter.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from stretto.distributed.devices.axes import AxisNames, make_varying
from stretto.kernels.problem.machine import Machine


def connects_devices() -> bool:
    """Whether XLA's collectives on the enclosing mesh are gloo's.

    They are on CPUs once `jax.distributed` is initialised, even between devices of one process.
    """
    return (
        Machine.of_mesh().platform == "cpu"
        and jax.distributed.is_initialized()
        and jax.config.jax_cpu_collectives_implementation == "gloo"
    )


def reduce_scatter(x: jax.Array, axis_name: AxisNames, *, axis: int) -> jax.Array:
    """This device's part along `axis` of the sum of every device's `x`."""
    size = x.shape[axis] // lax.axis_size(axis_name)
    start = lax.axis_index(axis_name) * size
    return lax.dynamic_slice_in_dim(lax.psum(x, axis_name), start, size, axis)


def all_gather(x: jax.Array, axis_name: AxisNames, *, axis: int) -> jax.Array:
    """Concatenation along `axis` of every device's `x`."""
    if not jnp.issubdtype(x.dtype, jnp.inexact):  # It has no derivative.
        return lax.all_gather(x, axis_name, axis=axis, tiled=True)
    return _all_gather(x, axis_name, axis)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _all_gather(x: jax.Array, axis_name: AxisNames, axis: int) -> jax.Array:
    return lax.all_gather(x, axis_name, axis=axis, tiled=True)


@_all_gather.defjvp
def _all_gather_jvp(axis_name, axis, primals, tangents):
    """The tangent is a sum, so that its transpose is one."""
    (x,), (x_dot,) = primals, tangents
    return _all_gather(x, axis_name, axis), _gathered_by_a_sum(x_dot, axis_name, axis)


def _gathered_by_a_sum(x: jax.Array, axis_name: AxisNames, axis: int) -> jax.Array:
    """The same as an all-gather: every device adds its part to zeros."""
    size, count = x.shape[axis], lax.axis_size(axis_name)
    zeros = jnp.zeros((*x.shape[:axis], count * size, *x.shape[axis + 1 :]), x.dtype)
    start = lax.axis_index(axis_name) * size
    whole = lax.dynamic_update_slice_in_dim(zeros, x, start, axis)
    return make_varying(lax.psum(whole, axis_name), _names(axis_name))


def _names(axis_name: AxisNames) -> tuple:
    return axis_name if isinstance(axis_name, tuple) else (axis_name,)
