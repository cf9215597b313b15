"""Barriers in shared memory."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from stretto.distributed.simulator.program import Compiler, Step, rule
from stretto.distributed.simulator.state.barriers import Barrier, BarrierArray, pick
from stretto.distributed.simulator.state.views import ViewPlan, plan_view
from stretto.distributed.simulator.state.waiting import Wait
from stretto.distributed.sites import Site


def barrier_view(compiler: Compiler, eqn: Any, ref: Any, leaves: list) -> ViewPlan:
    """The view of a barrier operand through its transforms."""
    tree = eqn.params.get("transforms_treedef") or eqn.params.get("barrier_transforms_treedef")
    return plan_view(compiler, ref, tree.unflatten(leaves) if tree is not None else ())


def arrive(task: Any, array: BarrierArray, index: int, site: Site) -> None:
    """One arrival of `task`, which reaches the block's neighbours too at a cluster barrier."""
    if not array.cluster_axes:
        array.items[index].arrive(task, site)
        return
    blocks = task.machine.cluster_neighbours(task.block, array.cluster_axes)
    if array.to_leader:
        blocks = task.machine.cluster_blocks(task.block, array.cluster_axes)[:1]
    for block in blocks:
        if not block.running and not block.has_tensor_memory:
            task.machine.checks.arrival_at_ended_block(array.name, block, task, site)
        peer = block.shared.get(array.key) or task.machine.allocate(block, array)
        peer.items[index].arrive(task, site)


def next_phase(task: Any, barrier: Barrier, site: Site) -> int:
    """The phase of `barrier` that `task` waits for next; its warps should agree on it."""
    counts = task.waits_on(barrier)
    if len({n % 2 for n in counts}) > 1:
        task.machine.checks.uneven_waits(barrier, counts, task, site)
    return max(counts)


def wait_for_barrier(task: Any, barrier: Barrier, site: Site) -> Generator:
    """Waits for the phase of `barrier` that is next for `task`."""
    waits = next_phase(task, barrier, site)
    task.count_wait(barrier)
    statistics = task.machine.report.statistics
    statistics.waits += 1
    if not barrier.is_over(waits):
        statistics.blocked_waits += 1
        begin = task.machine.now(task)
        wait = Wait(
            barrier,
            lambda: barrier.is_over(waits),
            site,
            lambda: f"barrier {barrier.name}, phase {waits} ({barrier.progress()})",
            lambda: _arrivals(barrier),
        )
        yield wait
        # The phase that let the task go: the barrier may have gone on since.
        task.pass_barrier(wait.result)
        task.machine.note(task, f"wait {barrier.name}", begin)
        return
    task.pass_barrier(barrier.end_of(waits))


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
    site = compiler.site

    def step(task: Any, env: list) -> Generator:
        task.polled = True
        yield
        array = view.owner(task, env)
        barrier = array.items[pick(view, array, env)]
        waits = next_phase(task, barrier, site)
        env[out] = barrier.is_over(waits)
        if env[out]:
            task.count_wait(barrier)
            task.pass_barrier(barrier.end_of(waits))

    return True, step
