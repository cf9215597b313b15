"""Kernels for GPUs on a CPU: a callback that the simulator answers, or an error.

Mosaic GPU kernels arrive as `mpmd_map`, which JAX can lower for CPU only in its own interpreter.
The simulator needs to lower it to a callback that brings the device's position and its operands.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import numpy as np
from jax.interpreters import mlir

from stretto.distributed.devices import clique
from stretto.distributed.private_jax import callbacks, kernel_operation, lowering
from stretto.distributed.private_jax.dialects import hlo, ir
from stretto.distributed.private_jax.inlining import zeros_of
from stretto.distributed.private_jax.kernel_operation import kernel_p


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoweredKernel:
    """A kernel call that is being lowered for CPU.

    Attributes:
      name: the kernel's name.
      jaxpr: its body, a function of refs of the operands and then of the results.
      pallas_mesh: grid, cluster and threads.
      interpret, compiler_params: what `plgpu.kernel` was given under these names.
      axis_names, axis_sizes: axes of the device mesh, or of the clique in it that the kernel runs
        on; none outside of `shard_map`.
      reverse: they count their devices from the end (`clique`).
      unordered: why no GPU runs a kernel that communicates on devices in this order, if none does.
      in_avals, out_avals: shapes and types of the operands and the results.
      aliases: results that are an operand's memory, as {result: operand}.
      program: the name of the program that it is part of.
      in_clique: it was made by `kernel.launch` for a team.
      abstract_mesh: the one that its body is typed for.
      params: all that its primitive was given.
      refusal: says what JAX has against lowering it for GPUs of a compute capability; to be called
        while it is lowered.
    """

    name: str
    jaxpr: Any
    pallas_mesh: Any
    interpret: Any
    compiler_params: Any
    axis_names: tuple[Hashable, ...]
    axis_sizes: tuple[int, ...]
    reverse: bool
    unordered: str | None
    in_avals: Sequence[Any]
    out_avals: Sequence[Any]
    aliases: dict[int, int]
    program: str
    in_clique: bool
    abstract_mesh: Any
    params: dict[str, Any]
    refusal: Callable[[tuple[int, int]], lowering.Refusal | None]


class Nothing:
    """Stands for a kernel that is not run: its results are zeros."""


type Stand = Callable[[callbacks.Visit], None] | Nothing
type KernelIntercept = Callable[[LoweredKernel], Stand | None]

_kernel_intercepts: list[KernelIntercept] = []


def install_kernel_interception(intercept: KernelIntercept) -> None:
    """Has `intercept` see every Mosaic GPU kernel that is lowered for CPU from now on.

    Args:
      intercept: from a kernel to the host function that runs it, which is called for each device
        with its `Visit`, at its position on those axes (row-major); to `Nothing`; or to None, to
        leave it to those that were installed before, or to JAX.
    """
    _kernel_intercepts.append(intercept)


def _stand_for(kernel: LoweredKernel) -> Stand | None:
    answers = (intercept(kernel) for intercept in reversed(_kernel_intercepts))
    return next((answer for answer in answers if answer is not None), None)


def lower_kernel_for_cpu(
    ctx: mlir.LoweringRuleContext, *operands, members: Sequence[int] | None = None, **params
):
    """The lowering of `mpmd_map` for CPU: a callback, or what JAX makes of it.

    `members` are the positions in the program's mesh of the devices that the kernel runs on, as it
    counts them: in their order or, in a kernel that counts from the end, in the other; all of them
    by default.
    """
    meshes, jaxprs = params["meshes"], params["jaxprs"]
    callback = None
    axis_context = ctx.module_context.axis_context
    if len(meshes) == 1 and kernel_operation.is_of_gpus(meshes[0]):
        device_mesh = getattr(axis_context, "mesh", None)
        shape = dict(device_mesh.shape) if device_mesh is not None else {}
        kernel = LoweredKernel(
            name=params["name"] or "kernel",
            jaxpr=jaxprs[0],
            pallas_mesh=meshes[0],
            interpret=params["interpret"],
            compiler_params=params["compiler_params"],
            axis_names=tuple(shape),
            axis_sizes=tuple(shape.values()),
            reverse=members is not None and members[0] > members[-1],
            # A clique's order has been looked at.
            unordered=_order_obstacle(device_mesh) if members is None else None,
            in_avals=ctx.avals_in,
            out_avals=ctx.avals_out,
            aliases={o: i for i, o in dict(params["input_output_aliases"]).items()},
            program=ir.StringAttr(ctx.module_context.module.operation.attributes["sym_name"]).value,
            in_clique=members is not None,
            abstract_mesh=jax.sharding.get_abstract_mesh(),
            params=params,
            refusal=functools.partial(lowering.refusal, ctx, params),
        )
        callback = _stand_for(kernel)
        if callback is None and not kernel.interpret:
            raise ValueError(
                f"kernel {kernel.name} needs GPUs; on a CPU run it with `stretto simulate SCRIPT`,"
                " or inside `stretto.simulate()`."
            )
    if callback is None:
        return kernel_operation.lower_elsewhere(ctx, *operands, **params)
    if isinstance(callback, Nothing):
        return [zeros_of(ctx, aval) for aval in ctx.avals_out]
    if members is not None:
        callback = _at_members(callback, sorted(members))
    position = (
        hlo.partition_id() if axis_context_is_spmd(axis_context) else mlir.ir_constant(np.uint32(0))
    )
    return callbacks.emit(ctx, callback, position, operands)


# A cached lowering would be made in a function of its own, out of the calls' order.
mlir.register_lowering(kernel_p, lower_kernel_for_cpu, platform="cpu", cacheable=False)


def _order_obstacle(mesh: Any) -> str | None:
    return clique.order_obstacle(mesh) if isinstance(mesh, jax.sharding.Mesh) else None


def _at_members(
    callback: Callable[[callbacks.Visit], None], members: Sequence[int]
) -> Callable[[callbacks.Visit], None]:
    """`callback`, called with positions in a mesh that are then counted among `members`."""
    numbers = {position: number for number, position in enumerate(members)}

    def call(visit: callbacks.Visit) -> None:
        callback(dataclasses.replace(visit, position=numbers[visit.position]))

    return call


def axis_context_is_spmd(axis_context: Any) -> bool:
    """Whether a program is lowered as one of many that run together on a mesh."""
    return getattr(axis_context, "mesh", None) is not None
