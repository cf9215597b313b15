"""What serves the dispatch and the combine where no kernel does, and their derivatives.

Each is the other's derivative, so rules take the record of the other.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from stretto.kernels.operation import Axes, Call, Kernel, Operation
from stretto.kernels.operations.perform import perform, run
from stretto.kernels.xla import experts as xla


@dataclasses.dataclass(frozen=True, kw_only=True)
class DispatchOptions:
    """Of a dispatch.

    Attributes:
      rows: that each device has room for.
    """

    rows: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class CombineOptions:
    """Of a combine.

    Attributes:
      wire_dtype: of the sums that cross between devices.
    """

    wire_dtype: Any


def _run_xla(operands: Any, call: Call) -> jax.Array:
    if isinstance(call.options, DispatchOptions):
        x, positions = operands
        return xla.dispatch(x, positions, call.axes, rows=call.options.rows)
    rows, weights, positions = operands
    wire_dtype = call.options.wire_dtype
    return xla.combine(rows, weights, positions, call.axes, wire_dtype=wire_dtype)


XLA = Kernel(
    Config=type(None),
    run=_run_xla,
    obstacle=lambda problem: None,
    default=lambda problem: None,
    candidates=lambda problem: iter(()),
)
"""XLA's operations, with the derivatives of the kernels: JAX's own of a gather would add up in the
type of the rows, and on GPUs in any order."""


def by_xla(operation: Operation, axes: Axes, options: Any, kernel: Kernel = XLA) -> Call:
    """The call that XLA's operations serve, as `kernel` has them."""
    return Call(
        operation=operation,
        kernel=kernel,
        config=None,
        axes=axes,
        options=options,
        backend="xla",
    )


def other(call: Call, operation: Operation, options: Any) -> Call:
    """A call of the other operation, served as this one is."""
    kernel = XLA if call.config is None else operation.kernels[0]
    return dataclasses.replace(
        call,
        operation=operation,
        kernel=kernel,
        config=None if kernel is XLA else kernel.Config(),
        options=options,
    )


def dispatch_forward(operands: Any, call: Call) -> tuple[jax.Array, jax.Array]:
    """The rows; what the derivative needs is where they went."""
    return run(operands, call), operands[1]


def dispatch_tangent(call: Call, positions: jax.Array, dots: Any) -> jax.Array:
    """It is linear in x."""
    return run((dots[0], positions), call)


def dispatch_backward(
    combine: Operation, call: Call, positions: jax.Array, bar: jax.Array
) -> tuple[Any, None]:
    """Every token gets the sum of its rows' cotangents."""
    ones = jnp.ones(positions.shape, jnp.float32)
    by = other(call, combine, CombineOptions(wire_dtype=bar.dtype))
    return perform((bar, ones, positions), by), None


def combine_forward(operands: Any, call: Call) -> tuple[jax.Array, Any]:
    """The sums; what the derivative needs are the operands."""
    return run(operands, call), operands


def combine_tangent(call: Call, residuals: Any, dots: Any) -> jax.Array:
    """It is linear in rows, and in weights."""
    rows, weights, positions = residuals
    rows_dot, weights_dot, _ = dots
    return run((rows_dot, weights, positions), call) + run((rows, weights_dot, positions), call)


def combine_backward(
    dispatch: Operation, call: Call, residuals: Any, bar: jax.Array
) -> tuple[Any, Any, None]:
    """rows_bar = weight * bar of the token, weights_bar = row . bar of the token."""
    rows, weights, positions = residuals
    by = other(call, dispatch, DispatchOptions(rows=rows.shape[0]))
    bars = perform((bar, positions), by).astype(jnp.float32)
    weight, here = xla.numbers_of_rows(weights, positions, call.axes, rows=rows.shape[0])
    rows_bar = jnp.where(here[:, None], weight[:, None] * bars, 0).astype(rows.dtype)
    products = jnp.where(here, jnp.sum(rows.astype(jnp.float32) * bars, axis=1), 0)
    weights_bar = xla.numbers_of_entries(products, positions, call.axes)
    return rows_bar, weights_bar.astype(weights.dtype), None
