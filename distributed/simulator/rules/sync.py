"""Semaphores."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import numpy as np

from stretto.distributed.simulator.program import Compiler, Step, rule
from stretto.distributed.simulator.reports.deadlock import who_signals
from stretto.distributed.simulator.state.barriers import pick
from stretto.distributed.simulator.state.races import Access
from stretto.distributed.simulator.state.semaphores import Semaphore
from stretto.distributed.simulator.state.views import plan_view
from stretto.distributed.simulator.state.waiting import Wait
from stretto.distributed.sites import Site


def _semaphore_arguments(eqn: Any) -> list:
    tree = eqn.params["args_tree"]
    return list(tree.unflatten(eqn.invars[: tree.num_leaves]))


def _note_signal(compiler: Compiler, ref: Any) -> Site:
    """Remembers, for deadlock reports, that the semaphore `ref` is signalled here."""
    tag = compiler.tag(ref)
    if tag is not None:
        sites = compiler.kernel.signal_sites.setdefault(tag, [])
        if compiler.site not in sites:
            sites.append(compiler.site)
    return compiler.site


def signal(
    task: Any, semaphore: Semaphore, amount: int, access: Access, clock: Any, scope: str
) -> None:
    """Raises `semaphore` as `task`.

    Args:
      task: who signals.
      semaphore: what.
      amount: by how much.
      access: the signal as an access, taken before `clock`.
      clock: what the signal releases; None if it is relaxed.
      scope: "sys" or "gpu".
    """
    machine = task.machine
    if clock is not None and not semaphore.early:
        machine.touch(semaphore.device, access)
    machine.checks.atomic_touch(semaphore, access)
    machine.report.statistics.signals += 1
    semaphore.signalled_by[task.device.index, task.describe(), access.site] += 1
    target = machine.devices[semaphore.device].describe()
    machine.note(task, f"signal {semaphore.name} of {target}", machine.now(task))
    remote = semaphore.device != task.device.index
    arrival = task.time + (machine.cost.signal_latency if remote else 0.0)
    committed = None if clock is None or remote else task.committed.copy()
    semaphore.signal(amount, clock, committed, task.device.index, scope, arrival)


def _signal_step(
    compiler: Compiler, ref: Any, transforms: Any, amount: Any, device_id: Any, id_type: Any,
    scope: str,
) -> Step:  # fmt: skip
    view, site = plan_view(compiler, ref, transforms), _note_signal(compiler, ref)
    amount_of = compiler.reader(amount)
    if device_id is not None:
        view.peer = compiler.device_reader(device_id, id_type)

    def step(task: Any, env: list) -> Generator:
        yield
        array = view.owner(task, env)
        semaphore = array.items[pick(view, array, env)]
        remote = semaphore.device != task.device.index
        if remote and scope != "sys":
            task.machine.checks.narrow_signal(semaphore, task, site)
        access = task.access("signal", site, "sys")
        signal(task, semaphore, int(amount_of(env)), access, task.release(), scope)

    return True, step


@rule("stretto_name")
def _name(compiler: Compiler, eqn: Any) -> None:
    """Allocations are named when they are made, which is later."""
    compiler.kernel.semaphore_names[compiler.tag(eqn.invars[0])] = eqn.params["name"]


@rule("stretto_slot")
def _slot(compiler: Compiler, eqn: Any) -> Step:
    device_id = eqn.params["tree"].unflatten(eqn.invars)
    read, (out,) = compiler.device_reader(device_id, None), compiler.outs(eqn)

    def step(task: Any, env: list) -> None:
        env[out] = np.int32(read(task, env))

    return False, step


@rule("semaphore_signal", "stretto_signal")
def _semaphore_signal(compiler: Compiler, eqn: Any) -> Step:
    ref, transforms, amount, device_id, *_ = _semaphore_arguments(eqn)
    scope = eqn.params.get("memory_scope") or eqn.params.get("scope") or "sys"
    id_type = eqn.params.get("device_id_type")
    return _signal_step(compiler, ref, transforms, amount, device_id, id_type, scope)


@rule("semaphore_signal_multicast")
def _semaphore_signal_multicast(compiler: Compiler, eqn: Any) -> Step:
    ref, transforms, amount = _semaphore_arguments(eqn)
    view, site = plan_view(compiler, ref, transforms), _note_signal(compiler, ref)
    view.multicast = compiler.multicast_axes(eqn.params["collective_axes"])
    amount_of = compiler.reader(amount)

    def step(task: Any, env: list) -> Generator:
        yield
        access = task.access("signal", site, "sys")
        clock = task.release()
        for array in view.owners(task, env):
            semaphore = array.items[pick(view, array, env)]
            signal(task, semaphore, int(amount_of(env)), access, clock, "sys")

    return True, step


@rule("semaphore_signal_parallel")
def _semaphore_signal_parallel(compiler: Compiler, eqn: Any) -> Step:
    refs, transforms, amounts, device_ids = _semaphore_arguments(eqn)
    views, readers = [], []
    for ref, ts, amount, device_id in zip(refs, transforms, amounts, device_ids, strict=True):
        view = plan_view(compiler, ref, ts)
        _note_signal(compiler, ref)
        if device_id is not None:
            view.peer = compiler.device_reader(device_id, None)
        views.append(view)
        readers.append(compiler.reader(amount))
    site = compiler.site

    def step(task: Any, env: list) -> Generator:
        # Each is a relaxed update with a fence after it (0.11.2, 0.12.0.1): the first releases
        # nothing, the others what came before the first.
        clock = first = None
        for view, amount_of in zip(views, readers, strict=True):
            yield
            array = view.owner(task, env)
            semaphore = array.items[pick(view, array, env)]
            access = first or task.access("signal", site, "sys")
            signal(task, semaphore, int(amount_of(env)), access, clock, "sys")
            if first is None:
                first, clock = access, task.release()

    return True, step


@rule("semaphore_read")
def _semaphore_read(compiler: Compiler, eqn: Any) -> Step:
    ref, transforms = _semaphore_arguments(eqn)
    view, (out,), site = plan_view(compiler, ref, transforms), compiler.outs(eqn), compiler.site

    def step(task: Any, env: list) -> Generator:
        task.polled = True
        yield
        array = view.owner(task, env)
        semaphore = array.items[pick(view, array, env)]
        env[out] = semaphore.value
        task.acquire(*semaphore.look(task.device.index))
        task.machine.checks.atomic_touch(semaphore, task.access("read", site, "sys"))

    return True, step


@rule("stretto_zero")
def _zero(compiler: Compiler, eqn: Any) -> Step:
    (ref,), site = compiler.ins(eqn), compiler.site

    def step(task: Any, env: list) -> Generator:
        yield
        for semaphore in env[ref].items:
            task.machine.checks.plain_store(semaphore, task, site)
            semaphore.set(0)

    return True, step


@rule("semaphore_wait", "stretto_wait")
def _semaphore_wait(compiler: Compiler, eqn: Any) -> Step:
    ref, transforms, value, *rest = _semaphore_arguments(eqn)
    view, site = plan_view(compiler, ref, transforms), compiler.site
    value_of = compiler.reader(value)
    decrement: Callable[[list], Any] = (
        compiler.reader(rest[0]) if rest else lambda env: eqn.params["decrement"]
    )
    scope = eqn.params.get("memory_scope") or eqn.params.get("scope") or "sys"
    tag, kernel = compiler.tag(ref), compiler.kernel
    is_bounded = eqn.primitive.name == "stretto_wait"

    def helpers(semaphore: Semaphore) -> str:
        return who_signals(semaphore, kernel.signal_sites.get(tag, []))

    def step(task: Any, env: list) -> Generator:
        yield
        array = view.owner(task, env)
        semaphore = array.items[pick(view, array, env)]
        wanted = int(value_of(env))
        statistics = task.machine.report.statistics
        statistics.waits += 1
        begin, blocked = task.machine.now(task), semaphore.value < wanted
        statistics.blocked_waits += blocked
        needed = semaphore.ask(wanted)
        while semaphore.value < wanted:
            yield Wait(
                semaphore,
                lambda: semaphore.value >= wanted,
                site,
                lambda: f"semaphore {semaphore.name} >= {wanted}, which is {semaphore.value}",
                lambda: helpers(semaphore),
            )
        clock, committed, time = semaphore.take(
            wanted, task.device.index, scope, bool(decrement(env))
        )
        task.acquire(clock, committed)
        task.waits.add(semaphore, site, needed)
        blocked |= time > task.time
        task.time = max(task.time, time)
        if blocked:
            task.machine.note(task, f"wait {semaphore.name}", begin)
        access = task.access("wait", site, "sys")
        task.machine.checks.atomic_touch(semaphore, access)
        checks, takes = task.machine.checks, bool(decrement(env))
        if semaphore.persistent:
            checks.persistent_wait(semaphore, access, decrement=takes)
        if takes and is_bounded:
            checks.taking_wait(semaphore, access)

    return True, step
