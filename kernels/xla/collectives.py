"""The collectives as `jax.lax` has them, for arrays of any size."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from stretto.distributed.devices.axes import AxisNames
from stretto.kernels.xla import gloo


def all_gather(x: jax.Array, axis_name: AxisNames, *, axis: int) -> jax.Array:
    """Concatenation along `axis` of every device's `x`."""
    if 0 in x.shape:  # XLA refuses to move nothing.
        return jnp.concatenate([x] * lax.axis_size(axis_name), axis)
    if gloo.connects_devices():
        return gloo.all_gather(x, axis_name, axis=axis)
    return lax.all_gather(x, axis_name, axis=axis, tiled=True)


def reduce_scatter(x: jax.Array, axis_name: AxisNames, *, axis: int) -> jax.Array:
    """This device's part along `axis` of the sum of every device's `x`."""
    if 0 in x.shape:
        return lax.slice_in_dim(x, 0, x.shape[axis] // lax.axis_size(axis_name), axis=axis)
    if gloo.connects_devices():
        return gloo.reduce_scatter(x, axis_name, axis=axis)
    return lax.psum_scatter(x, axis_name, scatter_dimension=axis, tiled=True)


def all_reduce(x: jax.Array, axis_name: AxisNames) -> jax.Array:
    """Sum of every device's `x`."""
    return lax.psum(x, axis_name)


def all_to_all(
    x: jax.Array, axis_name: AxisNames, *, split_axis: int, concat_axis: int
) -> jax.Array:
    """Part `i` of `x` along `split_axis` goes to device `i`; parts join on `concat_axis`."""
    if 0 in x.shape:
        parts = jnp.split(x, lax.axis_size(axis_name), split_axis)
        return jnp.concatenate(parts, concat_axis)
    return lax.all_to_all(x, axis_name, split_axis, concat_axis, tiled=True)
