"""JAX's own lowering of a kernel for GPUs, on a machine that has none: does it take the kernel?

It is all of the compiler that is written in Python: what it refuses, no GPU runs. It needs no more
than JAX for CPUs. What comes after it (passes in C++, the assembler) is not run: `aot` does that.
Private JAX, checked on 0.11.2 and 0.12.0.1.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import threading
from collections.abc import Iterator, Sequence
from typing import Any, cast

import jax
from jax._src import core as jax_core
from jax._src.interpreters import mlir
from jax._src.pallas import mpmd
from jax._src.pallas.mosaic_gpu import core as gpu_core
from jax._src.pallas.mosaic_gpu import lowering as gpu_lowering
from jax.experimental.mosaic.gpu import utils as gpu_utils

_LOCK = threading.RLock()


@dataclasses.dataclass(frozen=True)
class Refusal:
    """Why a kernel cannot be lowered for GPUs.

    Attributes:
      text: JAX's words.
      eqns: the equations of the kernel's jaxpr that it was at, the innermost last.
      line: the (file, line, primitive) of the operation that it was at, where it was past them.
    """

    text: str
    eqns: tuple[Any, ...] = ()
    line: tuple[str, int, str] | None = None


def refusal(
    ctx: mlir.LoweringRuleContext, params: dict[str, Any], capability: tuple[int, int]
) -> Refusal | None:
    """What JAX has against lowering the kernel of an `mpmd_map` for GPUs; None if nothing.

    Args:
      ctx: of its lowering for CPUs, whose mesh and shapes are taken.
      params: the operation's.
      capability: (major, minor), the compute capability of the GPUs.
    """
    (mesh,), (jaxpr,) = params["meshes"], params["jaxprs"]
    device_mesh = getattr(ctx.module_context.axis_context, "mesh", None)
    try:
        with (
            _lowering_for(capability),
            mpmd.mpmd_map_tracing_context(mesh, (mesh, *params["external_meshes"])),
        ):
            gpu_lowering.lower_unpipelined_jaxpr_to_module(
                mesh,
                device_mesh,
                jaxpr,
                cast(Sequence[jax_core.ShapedArray], ctx.avals_in),
                cast(Sequence[jax_core.ShapedArray], ctx.avals_out),
                params["compiler_params"] or gpu_core.CompilerParams(),
                outer_traceback=ctx.traceback,
            )
    except Exception as error:
        return refusal_of(error)
    return None


def refusal_of(error: Exception) -> Refusal:
    """What `error`, raised while a kernel was lowered, says and where it was."""
    return Refusal(f"{type(error).__name__}: {error}", *_where(error))


@contextlib.contextmanager
def _lowering_for(capability: tuple[int, int]) -> Iterator[None]:
    """Has Mosaic GPU lower for such GPUs; without any at hand it would for Hopper."""
    with _LOCK:
        before = gpu_utils._infer_arch
        gpu_utils._infer_arch = lambda: capability
        try:
            yield
        finally:
            gpu_utils._infer_arch = before


def is_possible() -> bool:
    """Whether kernels can be lowered without being meant for the GPUs of this process."""
    return all(device.platform == "cpu" for device in jax.local_devices())


def _where(error: BaseException) -> tuple[tuple[Any, ...], tuple[str, int, str] | None]:
    """The equations or else the operation that were being lowered when `error` was raised."""
    eqns, line = [], None
    traceback = error.__traceback__
    while traceback is not None:
        frame = traceback.tb_frame
        if frame.f_code is gpu_lowering.lower_jaxpr_to_mosaic_gpu.__code__:
            eqns.append(frame.f_locals.get("eqn"))
        elif frame.f_code.co_name == "lower_op":
            line = _line(frame.f_locals.get("op")) or line
        traceback = traceback.tb_next
    return tuple(eqns), line


def _line(op: Any) -> tuple[str, int, str] | None:
    """The (file, line, primitive) that an operation of Mosaic GPU says it comes from."""
    match = re.search(r'"([^"]*)"\("([^"]+)":(\d+)', str(getattr(op, "location", "")))
    if match is None:
        return None
    names, file, line = match.groups()  # The name scopes, and last the primitive.
    return file, int(line), names.rstrip(":").split("/")[-1]
