"""Barriers and semaphores."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import numpy as np

from stretto.distributed.simulator.barriers import Barrier, BarrierArray, pick
from stretto.distributed.simulator.program import Compiler, Step, rule
from stretto.distributed.simulator.races import Access
from stretto.distributed.simulator.semaphores import Semaphore
from stretto.distributed.simulator.sites import Site
from stretto.distributed.simulator.views import ViewPlan, as_axes, plan_view
from stretto.distributed.simulator.waiting import Wait


def barrier_view(compiler: Compiler, eqn: Any, ref: Any, leaves: list) -> ViewPlan:
    """The view of a barrier operand through its transforms."""
    tree = eqn.params.get("transforms_treedef") or eqn.params.get("barrier_transforms_treedef")
    return plan_view(compiler, ref, tree.unflatten(leaves) if tree is not None else ())


def arrive(task: Any, array: BarrierArray, index: int, site: Site) -> None:
    """One arrival of `task`, which reaches every block of a cluster barrier."""
    if not array.cluster_axes:
        array.items[index].arrive(task, site)
        return
    for block in task.machine.cluster_blocks(task.block, array.cluster_axes):
        peer = block.shared.get(array.key) or task.machine.allocate(block, array)
        peer.items[index].arrive(task, site)


def wait_for_barrier(task: Any, barrier: Barrier, site: Site) -> Generator:
    """Waits for the phase of `barrier` that is next for `task`."""
    waits = task.phases.get(barrier, 0)
    task.phases[barrier] = waits + 1
    statistics = task.machine.report.statistics
    statistics.waits += 1
    if not barrier.is_over(waits):
        statistics.blocked_waits += 1
        begin = task.machine.now(task)
        yield Wait(
            barrier,
            lambda: barrier.is_over(waits),
            site,
            lambda: f"barrier {barrier.name}, phase {waits} ({barrier.progress()})",
            lambda: _arrivals(barrier),
        )
        task.time = max(task.time, barrier.time)
        task.machine.note(task, f"wait {barrier.name}", begin)
    task.time = max(task.time, barrier.time)
    task.acquire(barrier.done_clock, barrier.done_committed)


def _arrivals(barrier: Barrier) -> str:
    if not barrier.arrivals_seen:
        return "nobody has arrived in this phase"
    return "arrived so far: " + "; ".join(sorted({str(s) for s in barrier.arrivals_seen}))


@rule("barrier_arrive")
def _barrier_arrive(compiler: Compiler, eqn: Any) -> Step:
    ref, *leaves = eqn.invars
    predicate = None
    if eqn.params.get("has_user_predicate"):
        *leaves, predicate_atom = leaves
        predicate = compiler.reader(predicate_atom)
    view, site = barrier_view(compiler, eqn, ref, leaves), compiler.site

    def step(task: Any, env: list) -> Generator:
        if predicate is not None and not predicate(env):
            return
        yield
        array = view.owner(task, env)
        arrive(task, array, pick(view, array, env), site)

    return True, step


@rule("barrier_wait")
def _barrier_wait(compiler: Compiler, eqn: Any) -> Step:
    view, site = barrier_view(compiler, eqn, eqn.invars[0], eqn.invars[1:]), compiler.site

    def step(task: Any, env: list) -> Generator:
        yield
        array = view.owner(task, env)
        yield from wait_for_barrier(task, array.items[pick(view, array, env)], site)

    return True, step


@rule("barrier_arrive_and_wait")
def _barrier_arrive_and_wait(compiler: Compiler, eqn: Any) -> Step:
    view, site = barrier_view(compiler, eqn, eqn.invars[0], eqn.invars[1:]), compiler.site

    def step(task: Any, env: list) -> Generator:
        yield
        array = view.owner(task, env)
        index = pick(view, array, env)
        arrive(task, array, index, site)
        yield from wait_for_barrier(task, array.items[index], site)

    return True, step


@rule("barrier_test")
def _barrier_test(compiler: Compiler, eqn: Any) -> Step:
    view, (out,) = barrier_view(compiler, eqn, eqn.invars[0], eqn.invars[1:]), compiler.outs(eqn)

    def step(task: Any, env: list) -> Generator:
        task.polled = True
        yield
        array = view.owner(task, env)
        barrier = array.items[pick(view, array, env)]
        waits = task.phases.get(barrier, 0)
        env[out] = barrier.is_over(waits)
        if env[out]:
            task.phases[barrier] = waits + 1
            task.acquire(barrier.done_clock, barrier.done_committed)

    return True, step


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
    if clock is not None and not semaphore.persistent:
        machine.touch(semaphore.device, access)
    machine.checks.atomic_touch(semaphore, access)
    machine.report.statistics.signals += 1
    semaphore.signalled_by[task.describe(), access.site] += 1
    target = machine.devices[semaphore.device].describe()
    machine.note(task, f"signal {semaphore.name} of {target}", machine.now(task))
    remote = semaphore.device != task.device.index
    arrival = task.time + (machine.cost.signal_latency if remote else 0.0)
    semaphore.signal(amount, clock, task.device.index, scope, arrival)


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
    view.multicast = as_axes(eqn.params["collective_axes"])
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
        task.acquire(semaphore.look(task.device.index))
        task.machine.checks.atomic_touch(semaphore, task.access("read", site, "sys"))

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
    given_name = eqn.params.get("sem_name")
    tag, kernel = compiler.tag(ref), compiler.kernel

    def helpers(semaphore: Semaphore) -> str:
        lines = [f"{who} x{n} at {at}" for (who, at), n in semaphore.signalled_by.items()]
        told = "signalled so far by " + "; ".join(lines) if lines else "nobody has signalled it"
        sites = kernel.signal_sites.get(tag, [])
        could = "; ".join(map(str, sites)) if sites else "no signal of it is in the kernel"
        return f"{told}. Signals of it in the kernel: {could}"

    def step(task: Any, env: list) -> Generator:
        yield
        array = view.owner(task, env)
        semaphore = array.items[pick(view, array, env)]
        if given_name and array.name != given_name:
            array.rename(given_name)
        wanted = int(value_of(env))
        statistics = task.machine.report.statistics
        statistics.waits += 1
        begin, blocked = task.machine.now(task), semaphore.value < wanted
        statistics.blocked_waits += blocked
        while semaphore.value < wanted:
            yield Wait(
                semaphore,
                lambda: semaphore.value >= wanted,
                site,
                lambda: f"semaphore {semaphore.name} >= {wanted}, which is {semaphore.value}",
                lambda: helpers(semaphore),
            )
        clock, time = semaphore.take(wanted, task.device.index, scope, bool(decrement(env)))
        task.acquire(clock)
        blocked |= time > task.time
        task.time = max(task.time, time)
        if blocked:
            task.machine.note(task, f"wait {semaphore.name}", begin)
        access = task.access("wait", site, "sys")
        task.machine.checks.atomic_touch(semaphore, access)
        if semaphore.persistent:
            takes = bool(decrement(env))
            task.machine.checks.persistent_wait(semaphore, access, decrement=takes)

    return True, step
