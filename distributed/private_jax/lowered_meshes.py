"""The mesh that a program is lowered for, and another one in its place.

Private JAX, checked on 0.11.2 and 0.12.0.1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax._src.sharding_impls import SPMDAxisContext
from jax.interpreters import mlir
from jax.sharding import Mesh


@dataclasses.dataclass(frozen=True)
class _Member:
    """A device as JAX sees it when it lowers a kernel: all that it asks for."""

    id: int
    process_index: int


def mesh_of(context: mlir.ModuleContext) -> Mesh | None:
    """The mesh of devices that run the program together; None without one."""
    spmd = context.axis_context
    if isinstance(spmd, SPMDAxisContext) and isinstance(spmd.mesh, Mesh):
        return spmd.mesh
    return None


def context_of(
    context: mlir.ModuleContext,
    processes: Sequence[int],
    shape: Sequence[int],
    axis_names: Sequence[Any],
    rules: Sequence[tuple[Any, Callable[..., Any]]],
) -> mlir.ModuleContext:
    """`context`, which has a `mesh_of`, with another mesh in its place, of devices from 0 on.

    Args:
      context: of the program.
      processes: of each device, in order.
      shape, axis_names: the other mesh's.
      rules: (primitive, rule) of what is lowered in another way for it.
    """
    members = np.empty(len(processes), object)
    members[:] = [_Member(i, process) for i, process in enumerate(processes)]
    stand_in = Mesh(members.reshape(shape), axis_names)
    spmd: Any = context.axis_context
    overrides = context.lowering_parameters.override_lowering_rules or ()
    return context.replace(
        axis_context=SPMDAxisContext(stand_in, spmd.manual_axes),
        lowering_cache={},  # Its keys leave the mesh out.
        lowering_parameters=dataclasses.replace(
            context.lowering_parameters, override_lowering_rules=(*rules, *overrides)
        ),
    )
