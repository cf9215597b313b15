"""Allocations: `run_scoped`, `get_global`, `run_state`, and `core_map` over warps."""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import numpy as np

from stretto.distributed.simulator.barriers import BarrierArray
from stretto.distributed.simulator.errors import UnsupportedKernelError
from stretto.distributed.simulator.memory import Buffer, poison
from stretto.distributed.simulator.program import Compiler, Step, rule
from stretto.distributed.simulator.sites import assigned_name
from stretto.distributed.simulator.tasks import Task
from stretto.distributed.simulator.waiting import Wait, wake


@dataclass(frozen=True)
class Allocation:
    """One thing that a scope allocates.

    Attributes:
      kind: "shared", "union", "barrier", "semaphore" or "registers".
      name: what reports call it.
      shape: logical shape (bytes of a union).
      dtype: of the elements; None for barriers and semaphores.
      arrivals: of a barrier.
      cluster_axes: of a cluster barrier.
    """

    kind: str
    name: str
    shape: tuple[int, ...]
    dtype: Any = None
    arrivals: int = 0
    cluster_axes: tuple = ()

    @property
    def num_bytes(self) -> int:
        """Shared memory that it takes."""
        if self.kind == "barrier":
            return 8 * math.prod(self.shape)
        if self.kind in ("shared", "union"):
            return math.prod(self.shape) * np.dtype(self.dtype).itemsize
        return 0


def is_semaphore(aval: Any) -> bool:
    """Whether a ref's abstract value is of semaphores."""
    return type(aval.dtype).__name__ in ("Semaphore", "BarrierSemaphore")


def allocation_of(aval: Any, transforms: tuple, name: str) -> Allocation:
    """What an abstract ref of a scope allocates."""
    kind = type(aval).__name__
    if kind == "WGMMAAbstractAccumulatorRef":
        return Allocation("registers", name, aval.shape, aval.dtype)
    if kind == "AbstractRefUnion":
        return Allocation("union", name, aval.shape, np.int8)
    if is_semaphore(aval):
        return Allocation("semaphore", name, aval.shape)
    dtype = aval.dtype
    if type(dtype).__name__ == "BarrierType":
        return Allocation("barrier", name, aval.shape, None, dtype.num_arrivals)
    if type(dtype).__name__ == "ClusterBarrierType":
        axes = tuple(dtype.collective_axes)
        return Allocation("barrier", name, aval.shape, None, dtype.num_arrivals, axes)
    space = str(aval.memory_space)
    for transform in transforms:
        aval = transform.transform_type(aval)
    if space == "smem":
        return Allocation("shared", name, aval.shape, np.dtype(dtype))
    if space == "regs":
        return Allocation("registers", name, aval.shape, np.dtype(dtype))
    raise UnsupportedKernelError(f"an allocation in memory space {space}")


def _names(jaxpr: Any, count: int) -> list[str]:
    names = getattr(jaxpr.debug_info, "arg_names", None) or ()
    names = [n for n in names if n is not None]
    if len(names) != count:
        return [f"scratch {i}" for i in range(count)]
    return [str(n).split(".")[-1].split("[")[0] if count == 1 else str(n) for n in names]


@rule("run_scoped")
def _run_scoped(compiler: Compiler, eqn: Any) -> Step:
    jaxpr, axes = eqn.params["jaxpr"], tuple(eqn.params["collective_axes"])
    names = _names(jaxpr, len(jaxpr.invars))
    transforms = eqn.params.get("ref_transforms") or ((),) * len(jaxpr.invars)
    specs = [
        allocation_of(v.aval, t, n) for v, t, n in zip(jaxpr.invars, transforms, names, strict=True)
    ]
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
        tops = dict(task.semaphore_top)
        refs = [_allocate(task, spec, (number, i), axes, shared) for i, spec in enumerate(specs)]
        results = yield from body.run(task, [env[i] for i in ins] + refs)
        task.semaphore_top = tops
        if shared:
            _leave(task, number, sum(s.num_bytes for s in specs))
        for out, value in zip(outs, results, strict=True):
            env[out] = value

    return True, step


def _meet(task: Task, site: Any) -> Generator:
    """All warpgroups of a block enter a shared scope together."""
    barrier = task.block.barrier
    waits = task.phases.get(barrier, 0)
    task.phases[barrier] = waits + 1
    barrier.arrive(task, site)
    yield Wait(
        barrier,
        lambda: barrier.phase > waits,
        site,
        lambda: f"the other warpgroups of its block at {barrier.name} ({barrier.progress()})",
        lambda: "every warpgroup of the block must enter the same run_scoped",
    )
    task.acquire(barrier.done_clock, barrier.done_committed)
    task.time = max(task.time, barrier.time)


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
        top = task.semaphore_top.get(axes, 0)
        task.semaphore_top[axes] = top + math.prod(spec.shape)
        thread = None if shared else task.warpgroup
        where = ("scoped", block.index, thread, axes, top)
        return machine.semaphores(task.device, where, spec.name, spec.shape)
    if not shared:
        key = (*key, "of warpgroup", task.warpgroup)
    found = block.shared.get(key)
    if found is None:
        found = block.shared[key] = _make(machine, block, spec, key)
    if key[0] not in block.scope_bytes or spec.num_bytes:
        _count_bytes(task, key, spec.num_bytes)
    return found


def _make(machine: Any, block: Any, spec: Allocation, key: Any) -> Any:
    if spec.kind == "barrier":
        expected, axes = spec.arrivals, spec.cluster_axes
        if axes:
            expected *= len(machine.cluster_blocks(block, axes))
        return BarrierArray(spec.name, spec.shape, expected, machine.scheduler, key, axes)
    return Buffer(
        poison(spec.shape, spec.dtype), name=spec.name, space="smem", device=block.device.index,
        block=block.index, key=key, written=False, is_union=spec.kind == "union",
    )  # fmt: skip


def like(machine: Any, block: Any, ref: Any) -> Any:
    """For `block`, the same allocation as `ref` is for another block of its cluster."""
    if isinstance(ref, BarrierArray):
        expected = ref.items[0].expected
        name = ref.ids.name
        return BarrierArray(
            name, ref.ids.data.shape, expected, machine.scheduler, ref.key, ref.cluster_axes
        )
    return Buffer(
        poison(ref.data.shape, ref.data.dtype), name=ref.name, space="smem",
        device=block.device.index, block=block.index, key=ref.key, written=False,
        is_union=ref.is_union,
    )  # fmt: skip


def _count_bytes(task: Task, key: tuple, num_bytes: int) -> None:
    """Adds the bytes of an allocation once a block, whoever of its warpgroups comes first."""
    block = task.block
    if block.scope_exits.get(("counted", *key)):
        return
    block.scope_exits["counted", *key] = 1
    block.shared_bytes += num_bytes
    statistics = task.machine.report.statistics
    statistics.peak_shared_bytes = max(statistics.peak_shared_bytes, block.shared_bytes)


def _leave(task: Task, number: int, num_bytes: int) -> None:
    """The last warpgroup to leave a shared scope gives its memory back."""
    block = task.block
    block.scope_exits[number] = block.scope_exits.get(number, 0) + 1
    if block.scope_exits[number] < task.machine.num_warpgroups:
        return
    block.shared_bytes -= num_bytes
    for key in [k for k in block.shared if k[0] == number]:
        del block.shared[key]


@rule("get_global")
def _get_global(compiler: Compiler, eqn: Any) -> Step:
    what = eqn.params["what"]
    if not is_semaphore(what):
        raise UnsupportedKernelError(f"get_global of {what}")
    number = compiler.kernel.num_globals
    compiler.kernel.num_globals += 1
    name = assigned_name(compiler.site) or f"global semaphore {number}"
    (out,) = compiler.outs(eqn)
    compiler.tags[eqn.outvars[0]] = (name, "global", number)
    shape = what.shape

    def step(task: Any, env: list) -> None:
        env[out] = task.machine.semaphores(task.device, ("global", number), name, shape)

    return False, step


@rule("run_state")
def _run_state(compiler: Compiler, eqn: Any) -> Step:
    jaxpr = eqn.params["jaxpr"]
    body = compiler.sub(jaxpr, eqn.invars)
    ins, outs = compiler.ins(eqn), compiler.outs(eqn)
    site = compiler.site

    def step(task: Any, env: list) -> Generator:
        refs = []
        for slot in ins:
            value = env[slot]
            if isinstance(value, np.ndarray | np.generic | int | float):
                data = np.array(value)
                value = Buffer(data, name="state", space="registers", device=task.device.index,
                               block=task.block.index, key=None, written=True)  # fmt: skip
            refs.append(value)
        yield from body.run(task, refs)
        for matmul in task.matmuls:  # The values of accumulators are waited for.
            task.acquire_one(*matmul)
        task.matmuls.clear()
        for slot, out, ref in zip(ins, outs, refs, strict=True):
            env[out] = ref.data if ref is not env[slot] else ref

    del site
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
        for w in range(count):
            warp = Task(task.machine, task.block, task.warpgroup, w)
            warp.acquire(known, task.committed)
            warp.time, warp.phases = task.time, dict(task.phases)
            warp.body = _warp_body(body.run(warp, args), join, task.machine.scheduler)
            warps.append(warp)
            task.machine.tasks.append(warp)
            task.machine.scheduler.push(warp)
        yield Wait(join, lambda: not join.left, site, lambda: f"its {count} warps")
        for warp in warps:
            _absorb(task, warp)

    return True, step


def _warp_body(run: Generator[Any, None, Any], join: _Join, scheduler: Any) -> Generator:
    yield from run
    join.left -= 1
    wake(join, scheduler)


def _absorb(task: Task, warp: Task) -> None:
    """What a finished warp leaves to its warpgroup: what it knows, and its open copies."""
    task.acquire(warp.clock, warp.committed)
    task.time = max(task.time, warp.time)
    for barrier, waits in warp.phases.items():
        task.phases[barrier] = max(task.phases.get(barrier, 0), waits)
    task.groups.extend(warp.groups)
    task.uncommitted.extend(warp.uncommitted)
