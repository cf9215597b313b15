"""Why no kernel can serve a call, whatever the kernel: how the call is mapped, and its sizes."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import jax

from stretto.distributed.devices import clique, topology
from stretto.kernels.operation import Operation
from stretto.kernels.problem.problem import Problem

type Axes = tuple[Hashable, ...]


def of_call(operation: Operation, problem: Problem, axes: Axes) -> str | None:
    """What keeps every kernel from serving `problem` along `axes`; None where nothing does."""
    found = _of_sizes(problem) or _of_axes(axes)
    if found is None and operation.communicates:
        found = clique.order_obstacle_of_trace()
    return found


def _of_sizes(problem: Problem) -> str | None:
    symbolic = [f"{k}={v}" for k, v in problem.sizes.items() if not isinstance(v, int)]
    if symbolic:
        return f"{', '.join(symbolic)} is known when the program runs, and a kernel needs numbers."
    return None


def _of_axes(axes: Axes) -> str | None:
    mesh = jax.sharding.get_abstract_mesh()
    if mapped := _without(axes, mesh.manual_axes):
        return f"axis {topology.names_of(mapped)} is mapped by jax.vmap, and lies along no devices."
    if not mesh.manual_axes:
        return None  # A call of one device, outside of `shard_map`.
    if automatic := _without(mesh.axis_names, mesh.manual_axes):
        return (
            f"axis {topology.names_of(automatic)} of the mesh is left to the compiler, and a kernel"
            " needs all of them: leave axis_names out of shard_map."
        )
    return None


def _without(names: Iterable[Hashable], others: Iterable[Hashable]) -> Axes:
    return tuple(name for name in names if name not in others)
