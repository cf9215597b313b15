"""The public collectives: what they compute, what they refuse, and which implementation serves.

All take any shape and are reverse-differentiable. The fused kernels move whole contiguous parts, so
an array axis that is not the first costs a copy on either side (`flat`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp

from stretto.distributed.axes import AxisNames, axis_size, canonical_axes, varying_axes
from stretto.kernels import (
    checks,
    dispatch,
    exchange,
    flat,
    fused_collectives,
    gradients,
    hierarchical_collectives,
    moving,
    nodes,
    reference,
    summation,
)
from stretto.kernels.dispatch import Choice, Problem
from stretto.kernels.gradients import Primitive

type Axes = tuple[Hashable, ...]


def all_gather(
    x: jax.Array,
    axis_name: AxisNames,
    *,
    axis: int = 0,
    config: exchange.Config | nodes.Config | None = None,
    backend: str = "auto",
) -> jax.Array:
    """Concatenation along `axis` of every device's `x`, inside `jax.shard_map`; bit for bit.

    `x` `[..., s, ...]` per device -> `[..., D * s, ...]`, the same on every device of a team of D.
    Equals `lax.all_gather(x, axis_name, axis=axis, tiled=True)`.

    Args:
      x: an array of any type, random keys included.
      axis_name: mesh axis, or tuple of axes, to gather over.
      axis: of the array; may be negative.
      config: of the fused kernel, or `nodes.Config` for a team that spans nodes; chosen for the
        size by default.
      backend: "auto" (the fused kernel where it is faster), "pallas" (the fused kernel, or an
        error), "xla" (lax collectives), "simulator" (the fused kernel, simulated on CPU devices).

    Raises:
      ValueError: `x` is no array, `axis` is out of range, an unknown mesh axis or backend, a call
        outside `shard_map`, or a backend that cannot serve the call.

    Synchronisation: every device of the team must make the call.
    """
    axes, axis = (
        canonical_axes(axis_name),
        checks.check_array_axis("all_gather", "axis", axis, x),
    )
    back = functools.partial(
        reduce_scatter, axis_name=axes, axis=axis, backend=_backend_of_sums(backend, x)
    )
    if _moves_as_other_numbers(x):
        again = functools.partial(
            all_gather, axis_name=axes, axis=axis, config=config, backend=backend
        )
        return _move_as_other_numbers(x, axes, again, back)
    choice = _choose("all_gather", x, axes, backend, moving.ALL_GATHER, config)
    if choice.backend == "xla":
        return reference.all_gather(x, axes, axis=axis)
    call = _bind(choice, axes, config, axis=axis)
    return gradients.linear(*gradients.vary_alike(axes, x), gradients.Linear(call, back))


def reduce_scatter(
    x: jax.Array,
    axis_name: AxisNames,
    *,
    axis: int = 0,
    config: summation.Config | nodes.Config | None = None,
    backend: str = "auto",
) -> jax.Array:
    """This device's part along `axis` of the sum of every device's `x`, inside `jax.shard_map`.

    `x` `[..., D * s, ...]` per device -> `[..., s, ...]`. Equals `lax.psum_scatter(x, axis_name,
    scatter_dimension=axis, tiled=True)`; the fused kernel adds narrow floats in float32, in the
    order of the devices, and rounds once.

    Args, raises, synchronisation: as for `all_gather`; also ValueError where the array's axis is
    not a multiple of D. The fused kernel adds bfloat16, float16, float32 and int32.
    """
    op = "reduce_scatter"
    axes, axis = canonical_axes(axis_name), checks.check_array_axis(op, "axis", axis, x)
    checks.check_divisible(op, f"dimension {axis}", x.shape[axis], axis_size(axes))
    choice = _choose(op, x, axes, backend, moving.REDUCE_SCATTER, config)
    if choice.backend == "xla":
        return reference.reduce_scatter(x, axes, axis=axis)
    call = _bind(choice, axes, config, axis=axis)
    back = functools.partial(all_gather, axis_name=axes, axis=axis, backend=backend)
    return gradients.linear(*gradients.vary_alike(axes, x), gradients.Linear(call, back))


def all_reduce(
    x: jax.Array,
    axis_name: AxisNames,
    *,
    config: summation.Config | nodes.Config | None = None,
    backend: str = "auto",
) -> jax.Array:
    """Sum of every device's `x`, inside `jax.shard_map`; bitwise the same on every device.

    `x` of any shape per device -> the same shape. Equals `lax.psum(x, axis_name)`; the fused kernel
    adds narrow floats in float32, in the order of the devices, and rounds once.

    Args, raises, synchronisation: as for `all_gather`. The fused kernel adds bfloat16, float16,
    float32 and int32.
    """
    axes = canonical_axes(axis_name)
    checks.check_array("all_reduce", "x", x)
    choice = _choose("all_reduce", x, axes, backend, moving.ALL_REDUCE, config)
    if choice.backend == "xla":
        return reference.all_reduce(x, axes)
    call = _bind(choice, axes, config)
    (x,) = gradients.vary_alike(axes, x)
    back = functools.partial(gradients.sum_of_replicated, axes=axes, typed=bool(varying_axes(x)))
    return gradients.linear(x, gradients.Linear(call, back))


def all_to_all(
    x: jax.Array,
    axis_name: AxisNames,
    *,
    split_axis: int,
    concat_axis: int,
    config: exchange.Config | None = None,
    backend: str = "auto",
) -> jax.Array:
    """Part `i` of `x` along `split_axis` goes to device `i`; what arrives joins on `concat_axis`.

    Equals `lax.all_to_all(x, axis_name, split_axis, concat_axis, tiled=True)`, bit for bit.

    Args, raises, synchronisation: as for `all_gather`; also ValueError where the array's split
    axis is not a multiple of the team's size.
    """
    op = "all_to_all"
    axes = canonical_axes(axis_name)
    split_axis = checks.check_array_axis(op, "split_axis", split_axis, x)
    concat_axis = checks.check_array_axis(op, "concat_axis", concat_axis, x)
    checks.check_divisible(op, f"dimension {split_axis}", x.shape[split_axis], axis_size(axes))
    again = functools.partial(all_to_all, axis_name=axes, backend=backend)
    back = functools.partial(again, split_axis=concat_axis, concat_axis=split_axis)
    if _moves_as_other_numbers(x):
        again = functools.partial(
            again, split_axis=split_axis, concat_axis=concat_axis, config=config
        )
        parts = axis_size(axes) if split_axis == x.ndim - 1 else 1
        return _move_as_other_numbers(x, axes, again, back, parts)
    choice = _choose(op, x, axes, backend, moving.ALL_TO_ALL, config)
    if choice.backend == "xla":
        return reference.all_to_all(x, axes, split_axis=split_axis, concat_axis=concat_axis)
    call = _bind(choice, axes, config, split_axis=split_axis, concat_axis=concat_axis)
    return gradients.linear(*gradients.vary_alike(axes, x), gradients.Linear(call, back))


def _are_keys(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _moves_as_other_numbers(x: Any) -> bool:
    return _are_keys(x) or flat.bits_of(x.dtype) < 8


def _move_as_other_numbers(
    x: jax.Array, axes: Axes, move: Primitive, back: Primitive, parts: int = 1
) -> jax.Array:
    """`move` of other numbers that hold those of `x`; `parts` as for `flat.of_bytes`.

    Not only for the kernels: XLA's collectives on CPUs give wrong int2 (JAX 0.11.2).
    """
    if _are_keys(x):
        return flat.of_key_data(move, x)
    call = functools.partial(flat.of_bytes, move, parts=parts)
    return gradients.linear(*gradients.vary_alike(axes, x), gradients.Linear(call, back))


def _backend_of_sums(backend: str, x: Any) -> str:
    """`backend` for the derivative of an operation that moves `x`, whose type it may not add."""
    return backend if str(x.dtype) in moving.SUMMED else "auto"


def _choose(op: str, x: Any, axes: Axes, backend: str, kernel: Any, config: Any) -> Choice:
    platform, device_kind = dispatch.platform_of_mesh()
    problem = Problem(
        op=op,
        m=x.shape[0] if x.ndim else 1,
        k=0,
        n=math.prod(x.shape[1:]),
        dtype=str(x.dtype),
        out_dtype=str(x.dtype),
        devices=axis_size(axes),
        platform=platform,
        device_kind=device_kind,
    )
    return dispatch.choose(problem, backend, kernel, config, axes=axes)


def _bind(choice: Choice, axes: Axes, config: Any, **arguments: int) -> Primitive:
    """What serves a call that is not XLA's: the kernel, or over several nodes its hierarchy."""
    op = choice.problem.op
    arguments |= {"config": choice.config, "interpret": choice.interpret}
    if choice.split is None:
        return functools.partial(getattr(fused_collectives, op), axes=axes, **arguments)
    pieces = config.pieces if isinstance(config, nodes.Config) else None
    hierarchical = getattr(hierarchical_collectives, op)
    return functools.partial(hierarchical, split=choice.split, pieces=pieces, **arguments)
