"""Allocations: `run_scoped`, `get_global`, `run_state`, and `core_map` over warps."""

from __future__ import annotations

import math
from collections.abc import Generator
from typing import Any

import numpy as np

from stretto.distributed.memory import heap
from stretto.distributed.simulator.program import Compiler, Step, rule, to_scalar
from stretto.distributed.simulator.reports.errors import UnsupportedKernelError
from stretto.distributed.simulator.state.allocations import (
    Allocation,
    allocations_of,
    is_semaphore,
    make_shared,
)
from stretto.distributed.simulator.state.memory import Buffer
from stretto.distributed.simulator.state.tasks import Task
from stretto.distributed.simulator.state.waiting import Wait, wake
from stretto.distributed.sites import assigned_name


@rule("run_scoped")
def _run_scoped(compiler: Compiler, eqn: Any) -> Step:
    jaxpr, axes = eqn.params["jaxpr"], tuple(eqn.params["collective_axes"])
    specs = allocations_of(eqn)
    site = compiler.site
    tags = [compiler.tag(v) for v in eqn.invars]
    tags += [(s.name, id(eqn), i) if s.kind == "semaphore" else None for i, s in enumerate(specs)]
    body = compiler.sub(jaxpr, tags=tags, consts_are_operands=True)
    ins, outs = compiler.ins(eqn), compiler.outs(eqn)
    thread_name = compiler.kernel.mesh.thread_name
    is_shared = thread_name is not None and axes == (thread_name,)

    def step(task: Any, env: list) -> Generator:
        if is_shared:
            yield from _meet(task, site)
        number = task.scopes
        shared = is_shared or task.machine.num_warpgroups == 1
        if shared:
            task.scopes += 1
        tops = task.tops.copy()
        refs = [_allocate(task, spec, (number, i), axes, shared) for i, spec in enumerate(specs)]
        results = yield from body.run(task, [env[i] for i in ins] + refs)
        task.tops = tops
        if shared:
            task.block.leave_scope(
                number, task.machine.num_warpgroups, in_cluster=task.machine.has_clusters
            )
        for out, value in zip(outs, results, strict=True):
            env[out] = value

    return True, step


def _meet(task: Task, site: Any) -> Generator:
    """All warpgroups of a block enter a shared scope together."""
    barrier = task.block.barrier
    waits = task.waits_on(barrier)[0]
    task.count_wait(barrier)
    barrier.arrive(task, site)
    yield Wait(
        barrier,
        lambda: barrier.phase > waits,
        site,
        lambda: f"the other warpgroups of its block at {barrier.name} ({barrier.progress()})",
        lambda: "every warpgroup of the block must enter the same run_scoped",
    )
    task.pass_barrier(barrier.last)  # It cannot have gone on since: that takes this task.


def _allocate(task: Task, spec: Allocation, key: tuple, axes: tuple, shared: bool) -> Any:
    """What the task gets for one allocation of its scope."""
    machine, block = task.machine, task.block
    if spec.kind == "registers":
        data = np.zeros(spec.shape, spec.dtype)
        return Buffer(data, name=spec.name, space="registers", device=task.device.index,
                      block=block.index, key=None, written=True)  # fmt: skip
    if spec.kind == "semaphore":
        # Semaphores are one array for each kind of scope, and a scope takes the next few of them:
        # another scope that starts at the same place has the same ones, with what they hold.
        top = task.tops["semaphores", axes]
        task.tops["semaphores", axes] += math.prod(spec.shape)
        thread = None if shared else task.warpgroup
        where = ("scoped", block.index, thread, axes, top)
        return machine.semaphores(task.device, where, spec.name, spec.shape)
    start = task.tops[spec.pool]
    task.tops[spec.pool] += spec.room
    if spec.kind == "barrier":  # As memory of barriers is never given back, so what is in it.
        key = (*spec.pool, start)
    if not shared:
        key = (*key, "of warpgroup", task.warpgroup)
    found = block.shared.get(key)
    if found is None:
        found = make_shared(machine, block, spec, key, start)
        machine.add_shared(block, key, found)
    return found.named(spec.name, spec.shape) if spec.kind == "barrier" else found


@rule("get_global")
def _get_global(compiler: Compiler, eqn: Any) -> Step:
    what = eqn.params["what"]
    if not is_semaphore(what):
        raise UnsupportedKernelError(f"get_global of {what}")
    number = compiler.kernel.num_globals
    compiler.kernel.num_globals += 1
    (out,) = compiler.outs(eqn)
    compiler.tags[eqn.outvars[0]] = tag = ("global", number)
    written = assigned_name(compiler.site) or f"global semaphore {number}"
    names, shape = compiler.kernel.semaphore_names, what.shape

    def step(task: Any, env: list) -> None:
        name = names.get(tag, written)
        env[out] = task.machine.semaphores(task.device, ("global", number), name, shape)

    return False, step


@rule("stretto_heap_semaphores")
def _heap_semaphores(compiler: Compiler, eqn: Any) -> Step:
    what, word, name = (eqn.params[key] for key in ("what", "word", "sem_name"))
    (out,) = compiler.outs(eqn)
    compiler.tags[eqn.outvars[0]] = (name, "heap", word)
    early = word < heap.TURNS  # Of the handshake; others are a launch's own while it runs.

    def step(task: Any, env: list) -> None:
        env[out] = task.machine.semaphores(
            task.device, ("heap", word), name, what.shape, persistent=True, early=early
        )

    return False, step


@rule("run_state")
def _run_state(compiler: Compiler, eqn: Any) -> Step:
    """Values become refs for the time of a body, and come back as what the refs then hold.

    Where the body returns values, these come back first, in the refs' place: so Mosaic GPU lowers
    it (0.11.2, 0.12.0.1), and so code that returns what it read from an accumulator relies on it.
    """
    body = compiler.sub(eqn.params["jaxpr"], eqn.invars)
    ins, outs = compiler.ins(eqn), compiler.outs(eqn)
    is_value = [not hasattr(v.aval, "inner_aval") for v in eqn.outvars]
    dtypes = [v.aval.dtype for v in eqn.outvars]

    def step(task: Any, env: list) -> Generator:
        refs = [env[slot] for slot in ins]
        for i, one in enumerate(refs):
            if is_value[i]:
                refs[i] = Buffer(np.array(one, dtypes[i]), name="state", space="registers",
                                 device=task.device.index, block=task.block.index, key=None,
                                 written=True)  # fmt: skip
        returned = yield from body.run(task, refs)
        for matmul in task.matmuls:  # The values of accumulators are waited for.
            task.acquire_one(*matmul)
        task.matmuls.clear()
        final = [ref.data for ref, value in zip(refs, is_value, strict=True) if value]
        values = iter([*returned, *(x if x.ndim else to_scalar(x) for x in final)])
        for slot, out, value in zip(ins, outs, is_value, strict=True):
            env[out] = next(values) if value else env[slot]

    return True, step


class _Join:
    """What a warpgroup waits on while its warps run."""

    def __init__(self, count: int):
        self.left = count
        self.waiters: list = []
        self.name = "its warps"


@rule("mpmd_map", "core_map")
def _warps(compiler: Compiler, eqn: Any) -> Step:
    jaxprs = eqn.params.get("jaxprs") or (eqn.params["jaxpr"],)
    mesh = (eqn.params.get("meshes") or (eqn.params["mesh"],))[0]
    if len(jaxprs) != 1 or type(mesh).__name__ != "WarpMesh":
        raise UnsupportedKernelError(f"a kernel inside a kernel over {mesh}")
    body = compiler.sub(jaxprs[0], eqn.invars)
    ins, site = compiler.ins(eqn), compiler.site
    (count,) = mesh.shape.values()

    def step(task: Any, env: list) -> Generator:
        join, args = _Join(count), [env[i] for i in ins]
        known = task.release()
        warps = []
        for w, state in enumerate(task.split_warps(count)):
            warp = Task(task.machine, task.block, task.warpgroup, w)
            warp.acquire(known, task.committed, task.tensor)
            warp.time, warp.warps = task.time, [state]
            warp.body = _warp_body(body.run(warp, args), join, task.machine.scheduler)
            warps.append(warp)
            task.machine.tasks.append(warp)
            task.machine.scheduler.push(warp)
        yield Wait(join, lambda: not join.left, site, lambda: f"its {count} warps")
        for warp in warps:
            task.acquire(warp.clock, warp.committed, warp.tensor)
            task.time = max(task.time, warp.time)

    return True, step


def _warp_body(run: Generator[Any, None, Any], join: _Join, scheduler: Any) -> Generator:
    yield from run
    join.left -= 1
    wake(join, scheduler)
