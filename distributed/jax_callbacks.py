"""Calls from a CPU program to the host that stand for kernels, one after another on each device.

A GPU runs the kernels of a program in the order of its schedule, which is the same on every device.
On a CPU XLA runs whatever is ready, so two kernels that do not depend on each other may come in one
order on one device and in another on its peer, and each then waits for the peer at its own kernel.
Here every call takes a number from the result of the one before it. Private JAX, checked on 0.11.2
and 0.12.0.1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax._src import callback as jax_callback
from jax._src import core as jax_core
from jax._src import dispatch
from jax._src.interpreters import mlir
from jax._src.lib.mlir.dialects import hlo
from jaxlib.mlir import ir

_MARK = "mhlo.frontend_attributes"
_KERNEL = "stretto_kernel"


def emit(
    ctx: mlir.LoweringRuleContext,
    callback: Callable[..., Sequence[Any]],
    position: ir.Value,
    operands: Sequence[ir.Value],
) -> Sequence[ir.Value]:
    """Emits `callback(position, *operands)`, after the calls that the program has so far.

    Calls in a function of its own, as a nested `jit` makes, are in order among themselves only.

    Args:
      ctx: of the operation that is being lowered, whose operands and results these are.
      callback: called on each device.
      position: of the device, a uint32.
      operands: the operation's.
    """
    scalar = jax_core.ShapedArray((), np.dtype(np.uint32))
    before = _last_call(ir.InsertionPoint.current.block)
    leading = [position] if before is None else [position, _number_from(before)]
    avals_in = [*[scalar] * len(leading), *ctx.avals_in]

    def call(position: Any, *rest: Any) -> Sequence[Any]:
        return callback(position, *rest[len(leading) - 1 :])

    results, _, _ = jax_callback.emit_python_callback(
        ctx.replace(avals_in=avals_in),
        call,
        None,
        [*leading, *operands],
        avals_in,
        ctx.avals_out,
        has_side_effect=True,
        returns_token=False,
    )
    values: list[Any] = list(results)
    if values:
        values[0].owner.attributes[_MARK] = ir.DictAttr.get({_KERNEL: ir.StringAttr.get("true")})
    return values


def finish_programs() -> None:
    """Waits for the effects of programs that have been dispatched, and forgets those that failed.

    JAX would raise the error of a failed program again when the interpreter exits.
    """
    try:
        dispatch.runtime_tokens.block_until_ready()
    except Exception:  # Told already, where the program's results were asked for.
        dispatch.runtime_tokens.clear()


def _last_call(block: ir.Block) -> ir.Value | None:
    """A result, with elements, of the last call in `block`."""
    for operation in reversed(list(block.operations)):
        attributes = operation.operation.attributes
        if _MARK in attributes and _KERNEL in ir.DictAttr(attributes[_MARK]):
            filled = [r for r in operation.operation.results if math.prod(_shape(r))]
            return min(filled, key=lambda r: math.prod(_shape(r)), default=None)
    return None


def _number_from(value: ir.Value) -> ir.Value:
    """The first element of `value`, converted to uint32."""
    ones = mlir.dense_int_array([1] * len(_shape(value)))
    zeros = mlir.dense_int_array([0] * len(_shape(value)))
    first = hlo.slice(value, zeros, ones, ones)
    element = ir.RankedTensorType(value.type).element_type
    number = hlo.reshape(ir.RankedTensorType.get([], element), first)
    return hlo.convert(ir.RankedTensorType.get([], ir.IntegerType.get_unsigned(32)), number)


def _shape(value: ir.Value) -> list[int]:
    return ir.RankedTensorType(value.type).shape
