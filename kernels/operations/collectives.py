"""The public collectives: what they compute, what they refuse, and which implementation serves.

All take any shape and are reverse-differentiable. The fused kernels move whole contiguous parts, so
an array axis that is not the first costs a copy on either side (`collectives.row_layout`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax

from stretto.distributed.axes import AxisNames, axis_size, canonical_axes
from stretto.kernels.collectives import exchange, kernels, summation
from stretto.kernels.collectives.kernels import AxisOptions, ExchangeOptions
from stretto.kernels.nodes import hierarchical_collectives
from stretto.kernels.operation import (
    Axes,
    BetweenNodes,
    Call,
    Examples,
    Operand,
    Operation,
    Sizes,
)
from stretto.kernels.operations import examples, other_numbers
from stretto.kernels.operations.perform import cotangent_of_replicated, decide, perform
from stretto.kernels.problem import checks, node_config
from stretto.kernels.problem.problem import Problem, Types
from stretto.kernels.problem.work import Traffic, Work
from stretto.kernels.xla import collectives as xla


def all_gather(
    x: jax.Array,
    axis_name: AxisNames,
    *,
    axis: int = 0,
    config: exchange.Config | node_config.Config | None = None,
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
    axes = canonical_axes(axis_name)
    options = AxisOptions(axis=checks.check_array_axis("all_gather", "axis", axis, x))
    if other_numbers.are_needed(x):
        again = functools.partial(
            all_gather, axis_name=axes, axis=options.axis, config=config, backend=backend
        )
        back = functools.partial(
            reduce_scatter, axis_name=axes, axis=options.axis, backend=_backend_of_sums(backend, x)
        )
        return other_numbers.move(x, axes, again, back)
    return _moved(ALL_GATHER, x, axes, options, backend, config)


def reduce_scatter(
    x: jax.Array,
    axis_name: AxisNames,
    *,
    axis: int = 0,
    config: summation.Config | node_config.Config | None = None,
    backend: str = "auto",
) -> jax.Array:
    """This device's part along `axis` of the sum of every device's `x`, inside `jax.shard_map`.

    `x` `[..., D * s, ...]` per device -> `[..., s, ...]`. Equals `lax.psum_scatter(x, axis_name,
    scatter_dimension=axis, tiled=True)`; the fused kernel adds narrow floats in float32, in the
    order of the devices, and rounds once.

    Args, raises, synchronisation: as for `all_gather`; also ValueError where the array's axis is
    not a multiple of D. The fused kernel adds bfloat16, float16, float32 and int32.
    """
    axes = canonical_axes(axis_name)
    op, axis = "reduce_scatter", checks.check_array_axis("reduce_scatter", "axis", axis, x)
    checks.check_divisible(op, f"dimension {axis}", x.shape[axis], axis_size(axes))
    return _moved(REDUCE_SCATTER, x, axes, AxisOptions(axis=axis), backend, config)


def all_reduce(
    x: jax.Array,
    axis_name: AxisNames,
    *,
    config: summation.Config | node_config.Config | None = None,
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
    return _moved(ALL_REDUCE, x, axes, None, backend, config)


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
    options = ExchangeOptions(
        split_axis=checks.check_array_axis(op, "split_axis", split_axis, x),
        concat_axis=checks.check_array_axis(op, "concat_axis", concat_axis, x),
    )
    size = x.shape[options.split_axis]
    checks.check_divisible(op, f"dimension {options.split_axis}", size, axis_size(axes))
    if other_numbers.are_needed(x):
        along = dataclasses.asdict(options)
        again = functools.partial(all_to_all, axis_name=axes, backend=backend)
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
    sizes = dict(m=x.shape[0] if x.ndim else 1, n=math.prod(x.shape[1:]))
    types = Types(lhs=str(x.dtype), out=str(x.dtype))
    call = decide(operation, sizes, types, axes, options, backend=backend, config=config)
    return operation.reference(x, axes, options) if call is None else perform(x, call)


# --- References -----------------------------------------------------------------------------------


def _all_gather_reference(x: jax.Array, axes: Axes, options: AxisOptions) -> jax.Array:
    return xla.all_gather(x, axes, axis=options.axis)


def _reduce_scatter_reference(x: jax.Array, axes: Axes, options: AxisOptions) -> jax.Array:
    return xla.reduce_scatter(x, axes, axis=options.axis)


def _all_reduce_reference(x: jax.Array, axes: Axes, options: None) -> jax.Array:
    del options
    return xla.all_reduce(x, axes)


def _all_to_all_reference(x: jax.Array, axes: Axes, options: ExchangeOptions) -> jax.Array:
    return xla.all_to_all(x, axes, split_axis=options.split_axis, concat_axis=options.concat_axis)


# --- Derivatives: all are linear, so there is nothing to keep -------------------------------------


def _all_gather_backward(call: Call, _: None, bar: jax.Array) -> jax.Array:
    backend = _backend_of_sums(call.backend, bar)
    return reduce_scatter(bar, call.axes, axis=call.options.axis, backend=backend)


def _backend_of_sums(backend: str, x: jax.Array) -> str:
    """`backend` for the derivative of an operation that moves `x`, whose type it may not add."""
    return backend if str(x.dtype) in kernels.SUMMED else "auto"


def _reduce_scatter_backward(call: Call, _: None, bar: jax.Array) -> jax.Array:
    return all_gather(bar, call.axes, axis=call.options.axis, backend=call.backend)


def _all_reduce_backward(call: Call, _: None, bar: jax.Array) -> jax.Array:
    return cotangent_of_replicated(call, bar)


def _all_to_all_backward(call: Call, _: None, bar: jax.Array) -> jax.Array:
    options: ExchangeOptions = call.options
    return all_to_all(
        bar,
        call.axes,
        split_axis=options.concat_axis,
        concat_axis=options.split_axis,
        backend=call.backend,
    )


# --- Batches of `vmap`: dimensions like others ----------------------------------------------------


def _batched(launch: Any, size: int, batched: Any, x: jax.Array, call: Call) -> jax.Array:
    """One launch: with the batch in front, every axis is one further on."""
    del size, batched
    options = call.options
    if options is not None:
        axes = {name: axis + 1 for name, axis in dataclasses.asdict(options).items()}
        call = dataclasses.replace(call, options=dataclasses.replace(options, **axes))
    return launch(x, call)


# --- Records --------------------------------------------------------------------------------------


def _work(problem: Problem, *, collective: str) -> Work:
    shape = problem.sizes["m"], problem.sizes["n"]
    itemsize, devices = problem.types.itemsize, problem.devices
    return Work(
        traffic=Traffic(collective=collective, shape=shape, itemsize=itemsize, devices=devices)
    )


def _operands(sizes: Sizes, devices: int, *, sharded: bool = False) -> tuple[Operand, ...]:
    """One device's operand: all of the tensor, or `sharded`, its share of the rows."""
    return (Operand(shape=(sizes["m"] // (devices if sharded else 1), sizes["n"])),)


def _problem_of_a_share(sizes: Sizes, devices: int) -> Sizes:
    """The sizes of one device's operand, where an example's are those of all devices' together."""
    return {**sizes, "m": sizes["m"] // devices}


ALL_GATHER = Operation(
    name="all_gather",
    public=all_gather,
    sizes=("m", "n"),
    reference=_all_gather_reference,
    backward=_all_gather_backward,
    batched=_batched,
    work=functools.partial(_work, collective="all_gather"),
    kernels=(kernels.ALL_GATHER,),
    between_nodes=BetweenNodes(run=hierarchical_collectives.all_gather, divided=()),
    examples=Examples(
        sets=examples.COLLECTIVE_SETS,
        shapes=examples.collective,
        operands=functools.partial(_operands, sharded=True),
        problem=_problem_of_a_share,
        needs=lambda sizes, d: (("m", sizes["m"], d),),
    ),
)

REDUCE_SCATTER = Operation(
    name="reduce_scatter",
    public=reduce_scatter,
    sizes=("m", "n"),
    reference=_reduce_scatter_reference,
    backward=_reduce_scatter_backward,
    batched=_batched,
    work=functools.partial(_work, collective="reduce_scatter"),
    kernels=(kernels.REDUCE_SCATTER,),
    between_nodes=BetweenNodes(run=hierarchical_collectives.reduce_scatter, divided=("m",)),
    examples=Examples(
        sets=examples.COLLECTIVE_SETS,
        shapes=examples.collective,
        operands=_operands,
        needs=lambda sizes, d: (("m", sizes["m"], d),),
    ),
)

ALL_REDUCE = Operation(
    name="all_reduce",
    public=all_reduce,
    sizes=("m", "n"),
    reference=_all_reduce_reference,
    backward=_all_reduce_backward,
    batched=_batched,
    work=functools.partial(_work, collective="all_reduce"),
    kernels=(kernels.ALL_REDUCE,),
    between_nodes=BetweenNodes(run=hierarchical_collectives.all_reduce, divided=()),
    examples=Examples(
        sets=examples.COLLECTIVE_SETS, shapes=examples.collective, operands=_operands
    ),
)

ALL_TO_ALL = Operation(
    name="all_to_all",
    public=all_to_all,
    sizes=("m", "n"),
    reference=_all_to_all_reference,
    backward=_all_to_all_backward,
    batched=_batched,
    work=functools.partial(_work, collective="all_to_all"),
    kernels=(kernels.ALL_TO_ALL,),
    examples=Examples(
        sets=examples.COLLECTIVE_SETS,
        shapes=functools.partial(examples.collective, exchanges=True),
        operands=functools.partial(_operands, sharded=True),
        problem=_problem_of_a_share,
        needs=lambda sizes, d: (("m", sizes["m"], d * d),),
        keywords={"split_axis": 0, "concat_axis": 0},
    ),
)
