"""Cluster launch control of Blackwell: a running cluster takes the place of one yet to start.

`plgpu.dynamic_scheduling_loop` is made of it.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np

from stretto.distributed.simulator.program import Compiler, Step, rule
from stretto.distributed.simulator.rules.memory import load_region
from stretto.distributed.simulator.state.barriers import Barrier, pick
from stretto.distributed.simulator.state.copies import Copy
from stretto.distributed.simulator.state.memory import Region
from stretto.distributed.simulator.state.views import plan_view

_RESPONSE_BYTES = 16
_UNDEFINED = -0x5A5A5A5B
"""What a block index reads as, where none was claimed."""


class ClusterCancel(Copy):
    """A request for a cluster that has not started, whose answer lands later."""

    __slots__ = ()

    def describe(self) -> str:
        """The request in words."""
        return f"the try_cluster_cancel issued by {self.issuer.describe()}"


@rule("try_cluster_cancel")
def _try_cluster_cancel(compiler: Compiler, eqn: Any) -> Step:
    """Every caller arrives at its block's barrier; the first one asks, for all of its cluster."""
    p, leaves = eqn.params, list(eqn.invars[2:])
    trees = p["result_transforms_tree"], p["barrier_transforms_tree"]
    views = []
    for atom, tree in zip(eqn.invars[:2], trees, strict=True):
        count = 0 if tree is None else tree.num_leaves
        views.append(
            plan_view(compiler, atom, () if tree is None else tree.unflatten(leaves[:count]))
        )
        del leaves[:count]
    result, barrier = views
    axes, mesh, site = p["collective_axes"], compiler.kernel.mesh, compiler.site

    def step(task: Any, env: list) -> Generator:
        yield
        array, buffer = barrier.owner(task, env), result.owner(task, env)
        index = pick(barrier, array, env)
        is_first_thread = mesh.thread_name not in axes or task.warpgroup == 0
        if is_first_thread:
            array.items[index].expect(_RESPONSE_BYTES)
        array.items[index].arrive(task, site)
        is_first_block = not any(task.block.coords.get(axis) for axis in axes)
        if not (is_first_thread and is_first_block):
            return
        blocks = task.machine.cluster_blocks(task.block, tuple(mesh.cluster_names))
        targets = []
        for block in blocks:
            there = block.shared.get(buffer.key) or task.machine.allocate(block, buffer)
            barriers = block.shared.get(array.key) or task.machine.allocate(block, array)
            targets.append((result.within(there, env), barriers.items[index]))
        request = ClusterCancel(task, site, targets[0][0])
        for region, _ in targets:
            request.check_commit(region, writes=True)
        request.start(_claim(request, targets))
        task.machine.pending_loads.append(request)

    return True, step


def _claim(request: ClusterCancel, targets: list[tuple[Region, Barrier]]) -> Generator:
    machine = request.issuer.machine
    request.mark_read()
    yield
    claimed = machine.claim_cluster(request.issuer.device)
    answer = [0, 0, 0, 0] if claimed is None else [1, claimed.index, 0, 0]
    for region, _ in targets:
        access = request.access("copy's write", request.writing)
        machine.detector.write(region, access)
        machine.touch_shared(region.buffer, access, request.issuer.block)
        there = region.get()
        region.set(np.array(answer, np.int32).view(there.dtype).reshape(there.shape))
    request.mark_written()
    for _, barrier in targets:
        barrier.land(_RESPONSE_BYTES, request.writing, request.time)


@rule("query_cluster_cancel")
def _query_cluster_cancel(compiler: Compiler, eqn: Any) -> Step:
    tree, names = eqn.params["transforms_tree"], eqn.params["grid_names"]
    transforms = () if tree is None else tree.unflatten(eqn.invars[1:])
    view, site = plan_view(compiler, eqn.invars[0], transforms), compiler.site
    *positions, success = compiler.outs(eqn)

    def step(task: Any, env: list) -> None:
        response = load_region(task, view.region(task, env), site)
        is_claimed, index, *_ = np.ascontiguousarray(response).reshape(-1).view(np.int32).tolist()
        env[success] = bool(is_claimed)
        block = task.device.blocks[index] if is_claimed else None
        for slot, name in zip(positions, names, strict=True):
            env[slot] = _UNDEFINED if block is None else block.coords[name]

    return False, step
