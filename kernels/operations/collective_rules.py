"""Rules of the collectives' records: references, derivatives, batches, trees, sizes."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from stretto.distributed.devices.axes import axis_size
from stretto.kernels.collectives import arrays, row_layout
from stretto.kernels.collectives.kernels import SUMMED, AxisOptions, ExchangeOptions, SumOptions
from stretto.kernels.operation import Arrays, Axes, Call, Operand, Sizes
from stretto.kernels.operations.perform import run
from stretto.kernels.problem import checks
from stretto.kernels.problem.problem import Problem
from stretto.kernels.problem.work import Traffic, Work
from stretto.kernels.xla import collectives as xla
from stretto.kernels.xla.extremes import extreme

OPS = ("sum", "max", "min")


def all_gather_reference(x: jax.Array, axes: Axes, options: AxisOptions) -> jax.Array:
    """Through `lax.all_gather`."""
    return xla.all_gather(x, axes, axis=options.axis)


def reduce_scatter_reference(x: jax.Array, axes: Axes, options: SumOptions) -> jax.Array:
    """Through `lax.psum_scatter`; an extreme as a part of all of them."""
    axis = options.axis or 0
    if options.op == "sum":
        return xla.reduce_scatter(x, axes, axis=axis)
    size = x.shape[axis] // axis_size(axes)
    whole = extreme(x, axes, options.op)
    return lax.dynamic_slice_in_dim(whole, lax.axis_index(axes) * size, size, axis)


def all_reduce_reference(x: jax.Array, axes: Axes, options: SumOptions) -> jax.Array:
    """Through `lax.psum`, `lax.pmax` or `lax.pmin`."""
    return xla.all_reduce(x, axes) if options.op == "sum" else extreme(x, axes, options.op)


def all_to_all_reference(x: jax.Array, axes: Axes, options: ExchangeOptions) -> jax.Array:
    """Through `lax.all_to_all`."""
    return xla.all_to_all(x, axes, split_axis=options.split_axis, concat_axis=options.concat_axis)


def batched(launch: Any, size: int, batched: Any, x: jax.Array, call: Call) -> jax.Array:
    """One launch: with the batch in front, every axis is one further on."""
    del size, batched
    axes = {
        name: axis + 1
        for name, axis in dataclasses.asdict(call.options).items()
        if isinstance(axis, int)
    }
    return launch(x, call.with_options(**axes))


def backend_of_sums(backend: str, x: jax.Array) -> str:
    """`backend` for the derivative of an operation that moves `x`, whose type it may not add."""
    return backend if str(x.dtype) in SUMMED else "auto"


# --- Maxima and minima ----------------------------------------------------------------------------


def check_op(name: str, op: str, x: Any) -> None:
    """Raises ValueError unless `op` is a way of adding up, which the arrays of `x` have."""
    if op not in OPS:
        raise ValueError(f"{name}: op={op!r} is not one of {', '.join(map(repr, OPS))}.")
    for dtype in [leaf.dtype for leaf in jax.tree.leaves(x) if hasattr(leaf, "dtype")]:
        if jnp.issubdtype(dtype, jax.dtypes.prng_key):
            raise ValueError(
                f"{name}: x is {dtype}, random keys, which have no op={op!r}; derive new ones by"
                f" jax.random.fold_in."
            )
        if op != "sum" and jnp.issubdtype(dtype, jnp.complexfloating):
            raise ValueError(
                f"{name}: x is {dtype}, which has no order and so no op={op!r}; pass the op of"
                f" its real and imaginary parts, or op='sum'."
            )
        if jnp.issubdtype(dtype, jnp.integer) and row_layout.bits_of(dtype) < 4:
            raise ValueError(
                f"{name}: x is {dtype}, of which XLA has no op={op!r} over devices; cast it to"
                f" int8."
            )


def extreme_forward(x: Arrays, call: Call) -> tuple[Arrays, Arrays]:
    """The result; what the derivative needs is the operand."""
    return run(x, call), x


def extreme_backward(call: Call, x: jax.Array, bar: jax.Array) -> jax.Array:
    """XLA's: goes to the devices that have the largest or smallest."""
    _, pull_back = jax.vjp(lambda x: call.operation.reference(x, call.axes, call.options), x)
    return pull_back(bar)[0]


# --- Arrays of a tree, as parts -------------------------------------------------------------------


def with_new_axis(op: str, axis: int, x: Any) -> jax.Array:
    """`x` with a dimension of 1 at `axis`, along which shards are stacked."""
    checks.check_array(op, "x", x)
    axis = checks.check_integer(op, "axis", axis)
    if not -x.ndim - 1 <= axis <= x.ndim:
        raise ValueError(
            f"{op}: axis={axis} is out of range for a result of {x.ndim + 1} dimensions."
        )
    return jnp.expand_dims(x, axis)


def gathered(op: str, parts: jax.Array, x: jax.Array, axis: int, tiled: bool) -> jax.Array:
    """The gathered array of `x`, of every device's `[D, elements]`."""
    shards = parts.reshape(parts.shape[0], *x.shape)
    if not tiled:
        return jnp.moveaxis(shards, 0, axis)
    return arrays.joined(shards, checks.check_array_axis(op, "axis", axis, x))


def split(op: str, x: jax.Array, what: str, axis: int, parts: int) -> jax.Array:
    """`x` as `[parts, ...]`, cut along `axis`."""
    axis = checks.check_array_axis(op, what, axis, x)
    checks.check_divisible(op, f"dimension {axis}", x.shape[axis], parts)
    return arrays.split(x, axis, parts)


def own_part(op: str, part: jax.Array, x: jax.Array, axis: int, parts: int) -> jax.Array:
    """This device's part of `x` along `axis`, of its elements."""
    return part.reshape(jax.eval_shape(lambda x: split(op, x, "axis", axis, parts)[0], x).shape)


def exchanged(
    op: str, parts: jax.Array, x: jax.Array, split_axis: int, concat_axis: int
) -> jax.Array:
    """The received parts of `x`, `[D, elements]`, joined along `concat_axis`."""
    count = parts.shape[0]
    shape = jax.eval_shape(lambda x: split(op, x, "split_axis", split_axis, count), x).shape
    axis = checks.check_array_axis(op, "concat_axis", concat_axis, x)
    return arrays.joined(parts.reshape(shape), axis)


# --- Sizes ----------------------------------------------------------------------------------------


def work(problem: Problem, *, collective: str) -> Work:
    """A collective only sends."""
    shape = problem.sizes["m"], problem.sizes["n"]
    itemsize, devices = problem.types.itemsize, problem.devices
    return Work(
        traffic=Traffic(collective=collective, shape=shape, itemsize=itemsize, devices=devices)
    )


def operands(sizes: Sizes, devices: int, *, sharded: bool = False) -> tuple[Operand, ...]:
    """One device's operand: all of the tensor, or `sharded`, its share of the rows."""
    return (Operand(shape=(sizes["m"] // (devices if sharded else 1), sizes["n"])),)


def problem_of_a_share(sizes: Sizes, devices: int) -> Sizes:
    """The sizes of one device's operand, where an example's are those of all devices' together."""
    return {**sizes, "m": sizes["m"] // devices}
