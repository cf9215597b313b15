"""Calls from a CPU program to the host that stand for kernels, one after another on each device.

A GPU runs the kernels of a program in the order of its schedule, which is the same on all devices.
On a CPU XLA runs whatever is ready. Here every call takes a number from the result of the one
before it, so that two runs of a program come to its kernels in one order. Nothing hangs where they
do not: a call holds no thread (`xla_calls`), so a device can be at several kernels at once.

XLA lets 32 programs wait on a device. Starting one more holds a thread for each device, and those
may be all that there are: the program that would make room could then not go on. So whoever starts
a program with kernels waits here until it has ended. Private JAX, checked on 0.11.2 and 0.12.0.1.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import secrets
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import core as jax_core
from jax._src import dispatch
from jax._src.interpreters import mlir, pxla
from jax._src.lib.mlir.dialects import hlo
from jaxlib.mlir import ir

from stretto.distributed.private_jax import xla_calls
from stretto.distributed.private_jax.host_arrays import HostArray

_MARK = "mhlo.frontend_attributes"
_KERNEL = "stretto_kernel"
_TARGET = "stretto_kernel_call"


@dataclasses.dataclass(frozen=True, eq=False)
class Visit:
    """A device that has come to a kernel, and waits there without a thread.

    Attributes:
      position: of the device.
      run, site: as of `xla_calls.Call`.
      operands: the device's, which must not be written.
    """

    position: int
    run: int
    site: int
    operands: list[np.ndarray]
    _call: xla_calls.Call
    _results: list[HostArray]

    def leave(self, results: Sequence[Any]) -> None:
        """Goes on with the device's program, in this thread and for long: give it one of its own.

        Results that are not what the program expects end it with an error.
        """
        try:
            places = zip(self._results, self._call.results, results, strict=True)
            for place, address, result in places:
                place.write(address, result)
        except ValueError as error:
            self.fail(error)
        else:
            self._call.finish()

    def fail(self, error: BaseException) -> None:
        """Ends the device's program with an error of the same text."""
        self._call.fail(f"{type(error).__name__}: {error}")


class _Target:
    """What the calls lowered with one key call: `receive`, and how its operands lie."""

    def __init__(
        self, receive: Callable[[Visit], None], operands: list[HostArray], results: list[HostArray]
    ):
        self.receive = receive
        self.operands = operands
        self.results = results


# Programs hold their targets. Keys are no other process's: a program may come out of a cache.
_targets: weakref.WeakValueDictionary[int, _Target] = weakref.WeakValueDictionary()
_keys = itertools.count(secrets.randbits(61))


def _receive(call: xla_calls.Call) -> None:
    target = _targets.get(call.key)
    if target is None:
        raise RuntimeError("the kernel of this program is another process's; compile it again")
    addresses = call.operands[: len(target.operands)]  # The last may be what orders the calls.
    position, *operands = (
        place.read(address) for place, address in zip(target.operands, addresses, strict=True)
    )
    target.receive(Visit(int(position), call.run, call.site, operands, call, target.results))


def emit(
    ctx: mlir.LoweringRuleContext,
    receive: Callable[[Visit], None],
    position: ir.Value,
    operands: Sequence[ir.Value],
) -> Sequence[ir.Value]:
    """Emits a call of `receive` after the calls that the program has so far.

    Calls in a function of its own, as a nested `jit` makes, are in order among themselves only.

    Args:
      ctx: of the operation that is being lowered, whose operands and results these are.
      receive: called on each device, and must not wait: the `Visit` is answered later.
      position: of the device, a uint32.
      operands: the operation's.
    """
    _install()
    scalar = jax_core.ShapedArray((), np.dtype(np.uint32))
    before = _last_call(ir.InsertionPoint.current.block)
    trailing = [] if before is None else [_number_from(before)]
    avals_in = [scalar, *ctx.avals_in, *[scalar] * len(trailing)]
    target = _Target(
        receive,
        [_host_array(aval) for aval in (scalar, *ctx.avals_in)],
        [_host_array(aval) for aval in ctx.avals_out],
    )
    _targets[key := next(_keys)] = target
    ctx.module_context.add_keepalive(target)
    lower = jax.ffi.build_ffi_lowering_function(_TARGET, has_side_effect=True)
    call = lower(ctx.replace(avals_in=avals_in), position, *operands, *trailing, key=np.int64(key))
    if call.results:
        call.attributes[_MARK] = ir.DictAttr.get({_KERNEL: ir.StringAttr.get("true")})
    return list(call.results)


def _host_array(aval: Any) -> HostArray:
    return HostArray(aval.shape, aval.dtype)


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


# --- The thread that starts a program with kernels waits for it -----------------------------------
# JAX starts a program from C++ unless it has effects, and then takes a token of what is under way.

_init = pxla.ExecuteReplicated.__init__
_handle_token_bufs = pxla.ExecuteReplicated._handle_token_bufs


def _init_with_effects(self: Any, *args: Any, **kwargs: Any) -> None:
    _init(self, *args, **kwargs)
    self.has_unordered_effects |= _has_kernels(self)


def _wait_for_kernels(self: Any, token_bufs: Any, sharded_token: Any) -> None:
    """Called by JAX once a program with effects has been started."""
    _handle_token_bufs(self, token_bufs, sharded_token)
    if _has_kernels(self):
        with contextlib.suppress(Exception):  # Raised where the program's results are asked for.
            sharded_token.block_until_ready()


def _has_kernels(program: Any) -> bool:
    return any(isinstance(kept, _Target) for kept in program.keepalive or ())


@functools.cache
def _install() -> None:
    """Prepares JAX and XLA for the first call that is emitted: no other program needs it."""
    xla_calls.register(_TARGET, _receive)
    pxla.ExecuteReplicated.__init__ = _init_with_effects
    pxla.ExecuteReplicated._handle_token_bufs = _wait_for_kernels
