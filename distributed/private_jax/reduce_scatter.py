"""Reduce-scatters of CPU devices that gloo connects, made of a sum.

Gloo's own gives processes 30 s to come to it, each time, which nothing sets (jax-ml/jax#40831), and
its numbers are wrong now and then (jax-ml/jax#40830). A sum has neither fault, and takes more
time. This one serves ``lax.psum_scatter`` and the derivative of ``lax.all_gather``; not what XLA
itself makes of a program whose axes are left to the compiler.

Private JAX, checked on 0.11.2 and 0.12.0.1.
"""

from __future__ import annotations

from typing import Any

import jax
from jax import lax
from jax._src.interpreters import mlir
from jax._src.lax import parallel


def make_of_sums() -> bool:
    """From now on this process lowers reduce-scatters for CPUs so. Returns whether it does."""
    primitive = getattr(parallel, "reduce_scatter_p", None)
    if primitive is None or jax.config.jax_cpu_collectives_implementation != "gloo":
        return False
    lowering = mlir.lower_fun(_part_of_sum, multiple_results=False)
    mlir.register_lowering(primitive, lowering, platform="cpu")
    return True


def _part_of_sum(
    x: jax.Array,
    *,
    axis_name: Any,
    scatter_dimension: int,
    axis_size: int,
    axis_index_groups: Any,
    tiled: bool,
) -> jax.Array:
    """What ``lax.psum_scatter`` is: a device's part of the sum over its group."""
    total = lax.psum(x, axis_name, axis_index_groups=axis_index_groups)
    place = lax.axis_index(axis_name)
    if axis_index_groups is not None:
        places = {device: i for group in axis_index_groups for i, device in enumerate(group)}
        place = jax.numpy.asarray([places[device] for device in sorted(places)])[place]
    size = x.shape[scatter_dimension] // axis_size
    part = lax.dynamic_slice_in_dim(total, place * size, size, scatter_dimension)
    return part if tiled else lax.squeeze(part, [scatter_dimension])
