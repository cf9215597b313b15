"""The public collectives: what they compute, what they refuse, and which implementation serves."""

from __future__ import annotations

import jax

from stretto.distributed.axes import AxisNames, axis_size, canonical_axes
from stretto.kernels import checks, reference


def all_gather(
    x: jax.Array, axis_name: AxisNames, *, axis: int = 0, backend: str = "auto"
) -> jax.Array:
    """Concatenation along `axis` of every device's `x`."""
    checks.check_backend(backend)
    axes = canonical_axes(axis_name)
    axis = checks.check_array_axis("all_gather", "axis", axis, x.ndim)
    return reference.all_gather(x, axes, axis=axis)


def reduce_scatter(
    x: jax.Array, axis_name: AxisNames, *, axis: int = 0, backend: str = "auto"
) -> jax.Array:
    """This device's part along `axis` of the sum of every device's `x`."""
    checks.check_backend(backend)
    axes = canonical_axes(axis_name)
    axis = checks.check_array_axis("reduce_scatter", "axis", axis, x.ndim)
    checks.check_divisible("reduce_scatter", f"dimension {axis}", x.shape[axis], axis_size(axes))
    return reference.reduce_scatter(x, axes, axis=axis)


def all_reduce(x: jax.Array, axis_name: AxisNames, *, backend: str = "auto") -> jax.Array:
    """Sum of every device's `x`."""
    checks.check_backend(backend)
    return reference.all_reduce(x, canonical_axes(axis_name))


def all_to_all(
    x: jax.Array, axis_name: AxisNames, *, split_axis: int, concat_axis: int, backend: str = "auto"
) -> jax.Array:
    """Part `i` of `x` along `split_axis` goes to device `i`; parts join on `concat_axis`."""
    checks.check_backend(backend)
    axes = canonical_axes(axis_name)
    split_axis = checks.check_array_axis("all_to_all", "split_axis", split_axis, x.ndim)
    concat_axis = checks.check_array_axis("all_to_all", "concat_axis", concat_axis, x.ndim)
    checks.check_divisible(
        "all_to_all", f"dimension {split_axis}", x.shape[split_axis], axis_size(axes)
    )
    return reference.all_to_all(x, axes, split_axis=split_axis, concat_axis=concat_axis)
