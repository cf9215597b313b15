"""The public collectives: what they compute, what they refuse, and which implementation serves.

All take any shape and are differentiable. The fused kernels move whole contiguous parts, so
an array axis that is not the first costs a copy on either side (`collectives.row_layout`). Their
records (`collective_records`) are at the end.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from stretto.distributed.devices.axes import AxisNames, axis_size, canonical_axes
from stretto.kernels.collectives import by_heap, exchange, summation
from stretto.kernels.collectives.kernels import AxisOptions, ExchangeOptions, SumOptions
from stretto.kernels.operation import Axes, Operation
from stretto.kernels.operations import collective_records as records
from stretto.kernels.operations import collective_rules as rules
from stretto.kernels.operations import other_numbers, trees
from stretto.kernels.operations.perform import decide, perform
from stretto.kernels.problem import checks, node_config
from stretto.kernels.problem.numpy_arrays import takes_numpy_arrays
from stretto.kernels.problem.problem import Types
from stretto.kernels.problem.promotion import by_default_rules


@takes_numpy_arrays
@by_default_rules
def all_gather(
    x: Any,
    axis_name: AxisNames,
    *,
    axis: int = 0,
    tiled: bool = True,
    config: exchange.Config | by_heap.Config | node_config.Config | None = None,
    backend: str = "auto",
) -> Any:
    """Concatenation along `axis` of every device's `x`, inside `jax.shard_map`; bit for bit.

    `x` `[..., s, ...]` per device -> `[..., D * s, ...]`, the same on every device of a team of D.
    Equals `lax.all_gather(x, axis_name, axis=axis, tiled=tiled)`: without `tiled`, stacked along a
    new dimension, `[..., D, s, ...]`.

    Args:
      x: an array of any type, random keys included; or a tree of arrays, of which those of one type
        are moved in one launch, joined by a copy.
      axis_name: mesh axis, or tuple of axes, to gather over.
      axis: of the array, or of the result that is stacked; may be negative.
      tiled: whether shards are joined, or stacked.
      config: of the fused kernel, `by_heap.Config` for the exchange through the heap, or
        `node_config.Config` for several nodes; chosen for the size by default.
      backend: "auto" (the fused kernel where it is faster), "pallas" (the fused kernel, or an
        error), "xla" (lax collectives), "simulator" (the fused kernel, simulated on CPU devices).

    Raises:
      ValueError: `x` holds what is no array, `axis` is out of range, an unknown mesh axis or
        backend, a call outside `shard_map`, or a backend that cannot serve the call.

    Synchronisation: every device of the team must make the call.
    """
    op, axes = "all_gather", canonical_axes(axis_name)
    checks.check_flag(op, "tiled", tiled)
    again = functools.partial(all_gather, axis_name=axes, axis=axis, config=config, backend=backend)
    if trees.is_tree(x):
        return trees.move(
            op,
            x,
            functools.partial(again, tiled=tiled),
            lambda parts: _fused(ALL_GATHER, parts, axes, AxisOptions(axis=0), backend, config),
            lambda leaf: leaf[None],
            lambda parts, leaf: rules.gathered(op, parts, leaf, axis, tiled),
        )
    if not tiled:
        return again(rules.with_new_axis(op, axis, x))
    options = AxisOptions(axis=checks.check_array_axis(op, "axis", axis, x))
    if other_numbers.are_needed(x):
        back = functools.partial(
            reduce_scatter,
            axis_name=axes,
            axis=options.axis,
            backend=rules.backend_of_sums(backend, x),
        )
        counted = functools.partial(again, axis=options.axis)  # Not from the end, of other numbers.
        return other_numbers.move(x, axes, counted, back)
    return _moved(ALL_GATHER, x, axes, options, backend, config)


@takes_numpy_arrays
@by_default_rules
def reduce_scatter(
    x: Any,
    axis_name: AxisNames,
    *,
    axis: int = 0,
    op: str = "sum",
    config: summation.Config | node_config.Config | None = None,
    backend: str = "auto",
) -> Any:
    """This device's part along `axis` of the sum of every device's `x`, inside `jax.shard_map`.

    `x` `[..., D * s, ...]` per device -> `[..., s, ...]`. Equals `lax.psum_scatter(x, axis_name,
    scatter_dimension=axis, tiled=True)`; the fused kernel adds narrow floats in float32, in the
    order of the devices, and rounds once. With `op` "max" or "min" the largest or smallest.

    Args:
      x: an array, or a tree of arrays, as for `all_gather`.
      axis_name: mesh axis, or tuple of axes, to add over.
      axis: of the array, cut into D equal parts; may be negative.
      op, config, backend: as for `all_reduce`.

    Raises, synchronisation: as for `all_reduce`; also ValueError where the array's axis is not a
    multiple of D, and for a sum of bools.
    """
    name, axes = "reduce_scatter", canonical_axes(axis_name)
    rules.check_op(name, op, x)
    dtypes = [getattr(leaf, "dtype", None) for leaf in jax.tree.leaves(x)]
    if op == "sum" and jnp.dtype(bool) in dtypes:
        raise ValueError(
            f"{name}: x is bool, which has no sum of its type; cast it, or pass op='max'."
        )
    if trees.is_tree(x):
        return trees.move(
            name,
            x,
            functools.partial(
                reduce_scatter, axis_name=axes, axis=axis, op=op, config=config, backend=backend
            ),
            lambda parts: _fused(
                _sums(REDUCE_SCATTER, op), parts, axes, SumOptions(op=op, axis=0), backend, config
            ),
            lambda leaf: rules.split(name, leaf, "axis", axis, axis_size(axes)),
            lambda parts, leaf: rules.own_part(name, parts, leaf, axis, axis_size(axes)),
        )
    axis = checks.check_array_axis(name, "axis", axis, x)
    checks.check_divisible(name, f"dimension {axis}", x.shape[axis], axis_size(axes))
    options = SumOptions(op=op, axis=axis)
    return _moved(_sums(REDUCE_SCATTER, op), x, axes, options, backend, config)


@takes_numpy_arrays
@by_default_rules
def all_reduce(
    x: Any,
    axis_name: AxisNames,
    *,
    op: str = "sum",
    config: summation.Config | by_heap.Config | node_config.Config | None = None,
    backend: str = "auto",
) -> Any:
    """Sum of every device's `x`, inside `jax.shard_map`; bitwise the same on every device.

    `x` of any shape per device -> the same shape. Equals `lax.psum(x, axis_name)`; the fused kernel
    adds narrow floats in float32, in the order of the devices, and rounds once. The kernel adds
    bfloat16, float16, float32 and int32.

    Args:
      x: an array, or a tree of arrays, as for `all_gather`.
      axis_name: mesh axis, or tuple of axes, to add over.
      op: "sum"; or "max" or "min", the largest or smallest of each element: `lax.pmax`, `lax.pmin`,
        with the derivative of `jnp.max`, which devices that have the same share. Over several nodes
        these are XLA's.
      config, backend: as for `all_gather`.

    Raises, synchronisation: as for `all_gather`; also ValueError for an unknown `op`, for
    random keys, for the largest or smallest of complex numbers, and for int2 and uint2.
    """
    name, axes = "all_reduce", canonical_axes(axis_name)
    rules.check_op(name, op, x)
    operation, options = _sums(ALL_REDUCE, op), SumOptions(op=op)
    if trees.is_tree(x):
        return trees.move(
            name,
            x,
            functools.partial(all_reduce, axis_name=axes, op=op, config=config, backend=backend),
            lambda parts: _fused(operation, parts, axes, options, backend, config),
            lambda leaf: leaf[None],
            lambda parts, leaf: parts.reshape(leaf.shape),
        )
    checks.check_array(name, "x", x)
    return _moved(operation, x, axes, options, backend, config)


@takes_numpy_arrays
@by_default_rules
def all_to_all(
    x: Any,
    axis_name: AxisNames,
    *,
    split_axis: int,
    concat_axis: int,
    config: exchange.Config | None = None,
    backend: str = "auto",
) -> Any:
    """Part `i` of `x` along `split_axis` goes to device `i`; what arrives joins on `concat_axis`.

    Inside `jax.shard_map`. `x` `[..., D * s, ..., c, ...]` per device -> `[..., s, ..., D * c,
    ...]`, with either axis first; along one axis alone the shape stays. Equals `lax.all_to_all(x,
    axis_name, split_axis, concat_axis, tiled=True)`, bit for bit.

    Args:
      x: an array of any type, or a tree of arrays, as for `all_gather`.
      axis_name: mesh axis, or tuple of axes, to exchange over.
      split_axis: of the array, cut into D equal parts; may be negative.
      concat_axis: along which the D parts that arrive are joined, in the order of their senders;
        may be negative.
      config, backend: as for `all_gather`.

    Raises, synchronisation: as for `all_gather`; also ValueError where the array's split axis is
    not a multiple of D.
    """
    op = "all_to_all"
    axes = canonical_axes(axis_name)
    again = functools.partial(all_to_all, axis_name=axes, backend=backend)
    if trees.is_tree(x):
        first = ExchangeOptions(split_axis=0, concat_axis=0)
        return trees.move(
            op,
            x,
            functools.partial(again, split_axis=split_axis, concat_axis=concat_axis, config=config),
            lambda parts: _fused(ALL_TO_ALL, parts, axes, first, backend, config),
            lambda leaf: rules.split(op, leaf, "split_axis", split_axis, axis_size(axes)),
            lambda parts, leaf: rules.exchanged(op, parts, leaf, split_axis, concat_axis),
        )
    options = ExchangeOptions(
        split_axis=checks.check_array_axis(op, "split_axis", split_axis, x),
        concat_axis=checks.check_array_axis(op, "concat_axis", concat_axis, x),
    )
    size = x.shape[options.split_axis]
    checks.check_divisible(op, f"dimension {options.split_axis}", size, axis_size(axes))
    if other_numbers.are_needed(x):
        along = dataclasses.asdict(options)
        back = functools.partial(
            again, split_axis=options.concat_axis, concat_axis=options.split_axis
        )
        parts = axis_size(axes) if options.split_axis == x.ndim - 1 else 1
        return other_numbers.move(
            x, axes, functools.partial(again, **along, config=config), back, parts
        )
    return _moved(ALL_TO_ALL, x, axes, options, backend, config)


def _moved(
    operation: Operation, x: jax.Array, axes: Axes, options: Any, backend: str, config: Any
) -> jax.Array:
    """The result of a collective whose arguments have been checked."""
    found = _fused(operation, x, axes, options, backend, config)
    return operation.reference(x, axes, options) if found is None else found


def _fused(
    operation: Operation, x: jax.Array, axes: Axes, options: Any, backend: str, config: Any
) -> jax.Array | None:
    """The kernel's result, None where XLA serves."""
    sizes = dict(m=x.shape[0] if x.ndim else 1, n=math.prod(x.shape[1:]))
    types = Types(lhs=str(x.dtype), out=str(x.dtype))
    call = decide(operation, sizes, types, axes, options, backend=backend, config=config)
    return None if call is None else perform(x, call)


def _sums(operation: Operation, op: str) -> Operation:
    """The record of a sum or, by `op`, of an extreme, which is not linear and has one node."""
    return operation if op == "sum" else EXTREMES[operation.name]


# --- Records --------------------------------------------------------------------------------------

ALL_GATHER = records.of_all_gather(all_gather, reduce_scatter)
REDUCE_SCATTER = records.of_reduce_scatter(reduce_scatter, all_gather)
ALL_REDUCE = records.of_all_reduce(all_reduce)
ALL_TO_ALL = records.of_all_to_all(all_to_all)
EXTREMES = records.of_extremes(REDUCE_SCATTER, ALL_REDUCE)
