"""Loads and stores: plain, atomic, and through the switch (multimem)."""

from __future__ import annotations

from collections.abc import Generator
from functools import reduce
from typing import Any

import numpy as np

from stretto.distributed.simulator.program import Compiler, Step, rule, to_scalar
from stretto.distributed.simulator.state.allocations import is_semaphore
from stretto.distributed.simulator.state.arithmetic import widen
from stretto.distributed.simulator.state.memory import Region
from stretto.distributed.simulator.state.reductions import REDUCTIONS
from stretto.distributed.simulator.state.semaphores import SemaphoreArray
from stretto.distributed.simulator.state.views import plan_view
from stretto.distributed.sites import Site


def _transforms(eqn: Any, first: int, tree: Any) -> Any:
    return () if tree is None else tree.unflatten(eqn.invars[first:])


def load_region(task: Any, region: Region, site: Site, what: str = "read") -> np.ndarray:
    """Reads a region as `task`, checks it, and counts what crosses a link."""
    buffer = region.buffer
    if buffer.space == "registers":
        return np.array(region.get())
    access = task.access(what, site)
    task.machine.detector.read(region, access)
    value = np.array(region.get())
    if buffer.space == "gmem":
        task.machine.touch(buffer.device, access)
        task.machine.count_link(buffer.device, task.device.index, value.nbytes)
    else:
        task.machine.touch_shared(buffer, access, task.block)
    return value


def store_region(
    task: Any, region: Region, value: Any, site: Site, what: str = "write", atomic: Any = None
) -> None:
    """Writes a region as `task`, checks it, and counts what crosses a link."""
    buffer = region.buffer
    if buffer.space != "registers":
        access = task.access(what, site, atomic)
        task.machine.detector.write(region, access)
        if buffer.space == "gmem":
            task.machine.touch(buffer.device, access)
            size = np.size(value) * buffer.data.itemsize
            task.machine.count_link(task.device.index, buffer.device, size)
        else:
            task.machine.touch_shared(buffer, access, task.block)
    region.set(value)


def _as_value(array: np.ndarray) -> Any:
    return to_scalar(array) if array.ndim == 0 else array


@rule("get", "load")
def _get(compiler: Compiler, eqn: Any) -> Step:
    view = plan_view(compiler, eqn.invars[0], _transforms(eqn, 1, eqn.params["tree"]))
    (out,), site = compiler.outs(eqn), compiler.site
    if is_semaphore(eqn.invars[0].aval):
        return _load_semaphore(view, out)

    def step(task: Any, env: list) -> Generator:
        region = view.region(task, env)
        if region.buffer.space == "gmem":
            yield
        env[out] = _as_value(load_region(task, region, site))

    return True, step


@rule("swap", "store")
def _swap(compiler: Compiler, eqn: Any) -> Step:
    view = plan_view(compiler, eqn.invars[0], _transforms(eqn, 2, eqn.params["tree"]))
    value, site = compiler.slot(eqn.invars[1]), compiler.site
    if is_semaphore(eqn.invars[0].aval):
        return _store_semaphore(view, value, site)
    out = None
    if eqn.outvars and compiler.is_used(eqn.outvars[0]):
        (out,) = compiler.outs(eqn)

    def step(task: Any, env: list) -> Generator:
        for buffer in view.owners(task, env):
            region = view.within(buffer, env)
            if buffer.space == "gmem":
                yield
            if out is not None:
                env[out] = _as_value(load_region(task, region, site))
            store_region(task, region, env[value], site)

    return True, step


def _load_semaphore(view: Any, out: int) -> Step:
    """A plain read of semaphores: their counts."""

    def step(task: Any, env: list) -> Generator:
        yield
        array: SemaphoreArray = view.owner(task, env)
        indices = np.asarray(view.within(array.ids, env).get())
        counts = np.array([array.items[int(i)].value for i in indices.reshape(-1)])
        env[out] = _as_value(counts.reshape(indices.shape))

    return True, step


def _store_semaphore(view: Any, value: int, site: Site) -> Step:
    """A plain store to semaphores; it must be ordered with signals and waits."""

    def step(task: Any, env: list) -> Generator:
        yield
        array: SemaphoreArray = view.owner(task, env)
        indices = np.asarray(view.within(array.ids, env).get()).reshape(-1)
        for i in indices:
            task.machine.checks.plain_store(array.items[int(i)], task, site)
            array.items[int(i)].set(int(np.asarray(env[value]).reshape(-1)[0]))

    return True, step


@rule("addupdate")
def _addupdate(compiler: Compiler, eqn: Any) -> Step:
    view = plan_view(compiler, eqn.invars[0], _transforms(eqn, 2, eqn.params["tree"]))
    value, site = compiler.slot(eqn.invars[1]), compiler.site

    def step(task: Any, env: list) -> Generator:
        region = view.region(task, env)
        if region.buffer.space == "gmem":
            yield
        store_region(task, region, load_region(task, region, site) + env[value], site)

    return True, step


@rule("mgpu_atomic_store")
def _atomic_store(compiler: Compiler, eqn: Any) -> Step:
    ref, transforms, value_atom = eqn.params["args_tree"].unflatten(eqn.invars)
    view = plan_view(compiler, ref, transforms)
    value, site = compiler.slot(value_atom), compiler.site
    kind = eqn.params["atomic_type"]
    combine = REDUCTIONS[str(getattr(kind, "value", kind)).lower()]

    def step(task: Any, env: list) -> Generator:
        region = view.region(task, env)
        yield
        # JAX gives these `.gpu` scope, whatever device the ref is on (0.11.2, 0.12.0.1).
        new = combine(region.get(), env[value])
        store_region(task, region, new, site, "atomic update", "gpu")

    return True, step


@rule("multimem_store")
def _multimem_store(compiler: Compiler, eqn: Any) -> Step:
    tree = eqn.params["transforms_tree"]
    view = plan_view(compiler, eqn.invars[1], _transforms(eqn, 2, tree))
    view.multicast = compiler.multicast_axes(eqn.params["collective_axes"])
    value, site = compiler.slot(eqn.invars[0]), compiler.site

    def step(task: Any, env: list) -> Generator:
        yield
        for buffer in view.owners(task, env):
            store_region(task, view.within(buffer, env), env[value], site, "multicast write")

    return True, step


@rule("multimem_load_reduce")
def _multimem_load_reduce(compiler: Compiler, eqn: Any) -> Step:
    view = plan_view(compiler, eqn.invars[0], _transforms(eqn, 1, eqn.params["tree"]))
    view.multicast = compiler.multicast_axes(eqn.params["collective_axes"])
    (out,), site = compiler.outs(eqn), compiler.site
    combine = REDUCTIONS[eqn.params["reduction_op"]]
    dtype = np.dtype(eqn.outvars[0].aval.dtype)

    def step(task: Any, env: list) -> Generator:
        yield
        regions = [view.within(buffer, env) for buffer in view.owners(task, env)]
        parts = [widen(load_region(task, r, site, "multicast read")) for r in regions]
        env[out] = _as_value(np.asarray(reduce(combine, parts)).astype(dtype))

    return True, step
