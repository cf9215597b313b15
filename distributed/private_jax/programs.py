"""Which programs JAX compiles for several processes, reported before it compiles them.

JAX has no public word for that. Private JAX, checked on 0.11.2 and 0.12.0.1: without the function
that is wrapped here nothing is reported.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import threading
from collections.abc import Callable
from typing import Any

from jax._src import compiler
from jaxlib.mlir import ir

_COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "collective_permute",
    "collective_broadcast",
)
_KERNEL = "mosaic_gpu"
_MOST_SHOWN = 160  # characters of a program's types


@dataclasses.dataclass(frozen=True)
class Program:
    """A program as all processes that run it must have it.

    Attributes:
      text: its name, and the types of its operands, for people.
      digest: of these, and of the collectives and kernels in it with their types: the same on all
        processes. What a process puts in of its own, such as a constant, does not change it.
      processes: who runs it, in order.
    """

    text: str
    digest: str
    processes: tuple[int, ...]


def watch(tell: Callable[[Program], None]) -> bool:
    """Has `tell` hear of every program that this process's main thread compiles for several.

    In the order in which they are compiled, which other threads would spoil. Returns whether
    anything will be told.
    """
    wrapped = getattr(compiler, "compile_or_get_cached", None)
    if wrapped is None:
        return False

    @functools.wraps(wrapped)
    def compile_and_tell(
        backend: Any, computation: Any, devices: Any, *args: Any, **kwargs: Any
    ) -> Any:
        processes = tuple(sorted({device.process_index for device in devices.flat}))
        if len(processes) > 1 and threading.current_thread() is threading.main_thread():
            tell(describe(computation, processes))
        return wrapped(backend, computation, devices, *args, **kwargs)

    compiler.compile_or_get_cached = compile_and_tell
    return True


def describe(module: ir.Module, processes: tuple[int, ...]) -> Program:
    """The `Program` that a lowered module is, for these processes."""
    name = ir.StringAttr(module.operation.attributes["sym_name"]).value
    operations: list[str] = []
    signature = ""

    def visit(operation: Any) -> ir.WalkResult:
        nonlocal signature
        kind = operation.name.rpartition(".")[2]
        if kind == "func" and _string(operation, "sym_name") == "main":
            signature = str(ir.TypeAttr(operation.attributes["function_type"]).value)
        elif kind in _COLLECTIVES or _KERNEL in _string(operation, "call_target_name"):
            types = ", ".join(str(operand.type) for operand in operation.operands)
            operations.append(f"{kind}({types})")
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    whole = "\n".join((name, signature, *operations))
    digest = hashlib.sha256(whole.encode()).hexdigest()[:16]
    return Program(f"{name} {_shortened(signature)}", digest, processes)


def _string(operation: Any, name: str) -> str:
    if name not in operation.attributes:
        return ""
    return ir.StringAttr(operation.attributes[name]).value


def _shortened(signature: str) -> str:
    """`(tensor<128x256xf32>) -> tensor<f32>` as `(128x256xf32) -> f32`, cut if it is long."""
    text = signature.replace("tensor<", "").replace(">", "").replace(") -", ") ->")
    return text if len(text) <= _MOST_SHOWN else text[:_MOST_SHOWN] + " ..."
