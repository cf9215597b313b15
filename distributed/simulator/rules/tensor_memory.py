"""Loads from and stores to tensor memory, which end once they have been waited for."""

from __future__ import annotations

from typing import Any

import numpy as np

from stretto.distributed.simulator.program import Compiler, Step, rule
from stretto.distributed.simulator.state import clocks, tensor_memory
from stretto.distributed.simulator.state.arithmetic import widen
from stretto.distributed.simulator.state.races import Access
from stretto.distributed.simulator.state.views import plan_view
from stretto.distributed.sites import Site

LOAD, STORE = "load from tensor memory", "store to tensor memory"

_REDUCTIONS = {
    "max": lambda x: x.max(axis=-1),
    "min": lambda x: x.min(axis=-1),
    "absmax": lambda x: np.abs(x).max(axis=-1),
    "absmin": lambda x: np.abs(x).min(axis=-1),
}


def _access(task: Any, what: str, place: tuple[int, int], site: Site) -> Access:
    return Access(what, task, site, task.device.index, task.clock, *place, is_async=True)


@rule("async_load")
def _async_load_tmem(compiler: Compiler, eqn: Any) -> Step:
    """The value is there at once; that the memory has been read is known after a wait alone."""
    view = plan_view(compiler, eqn.invars[0], eqn.params["tree"].unflatten(eqn.invars[1:]))
    outs, site, reduce = compiler.outs(eqn), compiler.site, eqn.params.get("reduce")

    def step(task: Any, env: list) -> None:
        region = view.region(task, env)
        place = task.asyncs.start(task.clock)
        tensor_memory.read(task.machine, region, _access(task, LOAD, place, site), task.tensor)
        task.tensor_loads.append(place)
        value = np.array(region.get())
        env[outs[0]] = value
        if reduce is not None:
            env[outs[1]] = _REDUCTIONS[reduce](widen(value)).astype(value.dtype)

    return False, step


@rule("wait_load_tmem")
def _wait_load_tmem(compiler: Compiler, eqn: Any) -> Step:
    return False, lambda task, env: _wait(task, task.tensor_loads)


@rule("async_store_tmem")
def _async_store_tmem(compiler: Compiler, eqn: Any) -> Step:
    view = plan_view(compiler, eqn.invars[0], eqn.params["tree"].unflatten(eqn.invars[2:]))
    value, site = compiler.slot(eqn.invars[1]), compiler.site

    def step(task: Any, env: list) -> None:
        region = view.region(task, env)
        place = task.asyncs.start(task.clock)
        tensor_memory.write(task.machine, region, _access(task, STORE, place, site), task.tensor)
        task.tensor_stores.append(place)
        region.set(env[value])

    return False, step


@rule("commit_tmem")
def _commit_tmem(compiler: Compiler, eqn: Any) -> Step:
    return False, lambda task, env: _wait(task, task.tensor_stores)


def _wait(task: Any, places: list[tuple[int, int]]) -> None:
    """`task` has waited for what it has under way at `places`."""
    for place in places:
        task.acquire_one(*place)
        task.tensor = clocks.advance(task.tensor, *place)
    places.clear()
