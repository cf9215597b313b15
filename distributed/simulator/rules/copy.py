"""Bulk copies between global and shared memory, and the waits for them."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

from stretto.distributed.memory.windows import Layout
from stretto.distributed.simulator.program import Compiler, Step, rule
from stretto.distributed.simulator.refusals.unsupported import CP_ASYNC
from stretto.distributed.simulator.reports.errors import KernelFaultError, UnsupportedKernelError
from stretto.distributed.simulator.state.barriers import pick
from stretto.distributed.simulator.state.copies import Copy, load_body, store_body
from stretto.distributed.simulator.state.engine import Taken, check_promise, taken
from stretto.distributed.simulator.state.leader_copies import start_tracked_by_leader
from stretto.distributed.simulator.state.memory import Region
from stretto.distributed.simulator.state.reductions import check_copied
from stretto.distributed.simulator.state.views import ViewPlan, plan_view
from stretto.distributed.simulator.state.waiting import Wait
from stretto.distributed.sites import Site


def _split(compiler: Compiler, eqn: Any, first: int) -> tuple[Any, Any, list, Callable | None]:
    """Source and destination transforms, what is left of the operands, and the predicate."""
    p = eqn.params
    rest = list(eqn.invars[first:])
    predicate = None
    if p["has_user_predicate"]:
        predicate = compiler.reader(rest.pop())
    n_src, n_dst = p["src_transforms_treedef"].num_leaves, p["dst_transforms_treedef"].num_leaves
    src = p["src_transforms_treedef"].unflatten(rest[:n_src])
    dst = p["dst_transforms_treedef"].unflatten(rest[n_src : n_src + n_dst])
    return src, dst, rest[n_src + n_dst :], predicate


@rule("copy_smem_to_gmem")
def _copy_smem_to_gmem(compiler: Compiler, eqn: Any) -> Step:
    src, dst, _, predicate = _split(compiler, eqn, 2)
    source = plan_view(compiler, eqn.invars[0], src)
    target = plan_view(compiler, eqn.invars[1], dst)
    commit, reduction = eqn.params["commit_group"], eqn.params["reduction_op"]
    layout = Layout.of(src)
    may_be_flat = reduction is None and not layout.rearranged
    if reduction is not None:
        check_copied(reduction, eqn.invars[0].aval.dtype)
    site = compiler.site

    def step(task: Any, env: list) -> Generator:
        if predicate is not None and not predicate(env):
            if commit:
                _commit(task)
            return
        yield
        takes = [
            taken(target, buffer, env, layout, may_be_flat=reduction is None)
            for buffer in target.owners(task, env)
        ]
        targets = [(t.region, None if t.overhang is None else t.overhang[1]) for t in takes]
        copy = Copy(task, site, targets[0][0])
        task.machine.checks.stray(copy, takes[0])
        region = source.region(task, env)
        task.machine.checks.aligned(copy, region, targets[0][0], may_be_flat=may_be_flat)
        copy.check_commit(region, writes=False)
        copy.start(store_body(copy, region, targets, reduction))
        task.warps[0].uncommitted.append(copy)
        if commit:
            _commit(task)

    return True, step


def _commit(task: Any) -> None:
    for warp in task.warps:
        warp.commit_group()


@rule("commit_group")
def _commit_group(compiler: Compiler, eqn: Any) -> Step:
    return False, lambda task, env: _commit(task)


@rule("wait_smem_to_gmem")
def _wait_smem_to_gmem(compiler: Compiler, eqn: Any) -> Step:
    allowed, read_only = eqn.params["n"], eqn.params["wait_read_only"]
    site = compiler.site

    def step(task: Any, env: list) -> Generator:
        for warp in task.warps:
            last = max(len(warp.groups) - allowed, 0)
            first = min(warp.read_awaited, last) if read_only else 0
            for copy in [c for group in warp.groups[first:last] for c in group]:
                yield from _wait_for_copy(task, copy, read_only, site)
            if read_only:
                warp.read_awaited = max(warp.read_awaited, last)
            else:
                del warp.groups[:last]
                warp.read_awaited = max(warp.read_awaited - last, 0)

    return True, step


def _wait_for_copy(task: Any, copy: Copy, read_only: bool, site: Site) -> Generator:
    done = (lambda: copy.read_done) if read_only else (lambda: copy.write_done)
    task.machine.report.statistics.waits += 1
    if not done():
        task.machine.report.statistics.blocked_waits += 1
        yield Wait(copy, done, site, lambda: copy.describe())
    task.time = max(task.time, copy.time)
    task.acquire_one(*(copy.reading if read_only else copy.writing))


@rule("copy_gmem_to_smem")
def _copy_gmem_to_smem(compiler: Compiler, eqn: Any) -> Step:
    if not eqn.params["has_barrier"]:
        raise UnsupportedKernelError(CP_ASYNC)
    src, dst, rest, predicate = _split(compiler, eqn, 3)
    source = plan_view(compiler, eqn.invars[0], src)
    target = plan_view(compiler, eqn.invars[1], dst)
    tree = eqn.params["barrier_transforms_treedef"]
    barrier = plan_view(compiler, eqn.invars[2], tree.unflatten(rest))
    axes, leader = tuple(eqn.params["collective_axes"] or ()), eqn.params["leader_tracked"]
    layout, mode = Layout.of(dst), eqn.params.get("oob_mode")
    may_be_flat = getattr(mode, "name", "ZEROS") != "ZEROS" and not layout.rearranged
    site = compiler.site

    def step(task: Any, env: list) -> Generator:
        yield
        if predicate is not None and not predicate(env):
            if leader is None or task.machine.cluster_blocks(task.block, axes)[0] is task.block:
                _arrive_without_bytes(task, barrier, env, site)
            return
        copy = Copy(task, site, target.region(task, env))
        loaded = taken(source, source.owner(task, env), env, layout, may_be_flat=False)
        task.machine.checks.stray(copy, loaded)
        broken = check_promise(mode, loaded.overhang)
        if broken is not None:
            raise KernelFaultError(broken)
        if leader is not None:
            array = barrier.owner(task, env)
            tracked = array, pick(barrier, array, env)
            destination = target.region(task, env)
            start_tracked_by_leader(task, copy, loaded, destination, tracked, axes, leader)
        elif axes:
            _start_multicast(task, copy, loaded, (target, barrier), env, axes)
        else:
            _start_load(task, copy, loaded, (target, barrier), env, may_be_flat)

    return True, step


def _arrive_without_bytes(task: Any, barrier: ViewPlan, env: list, site: Site) -> None:
    """What a copy into shared memory does whose predicate is false."""
    array = barrier.owner(task, env)
    array.items[pick(barrier, array, env)].arrive(task, site)


def _start_load(
    task: Any,
    copy: Copy,
    loaded: Taken,
    views: tuple[ViewPlan, ViewPlan],
    env: list,
    may_be_flat: bool,
) -> None:
    target, barrier = views
    destination = target.region(task, env)
    array = barrier.owner(task, env)
    item = array.items[pick(barrier, array, env)]
    task.machine.checks.aligned(copy, destination, loaded.region, may_be_flat=may_be_flat)
    copy.check_commit(destination, writes=True)
    num_bytes = destination.get().nbytes
    item.expect(num_bytes)
    item.arrive(task, copy.site)
    copy.start(load_body(copy, loaded.region, loaded.overhang, [(destination, item)], num_bytes))
    task.machine.pending_loads.append(copy)


def _start_multicast(
    task: Any,
    copy: Copy,
    loaded: Taken,
    views: tuple[ViewPlan, ViewPlan],
    env: list,
    axes: tuple,
) -> None:
    """Each block of the cluster loads its part of the source and sends it to all of them."""
    target, barrier = views
    region, fill = loaded.region, loaded.overhang
    machine = task.machine
    blocks = machine.cluster_blocks(task.block, axes)
    part, count = blocks.index(task.block), len(blocks)
    own, array = target.owner(task, env), barrier.owner(task, env)
    index = pick(barrier, array, env)
    whole = target.within(own, env)
    num_bytes = whole.get().nbytes
    array.items[index].expect(num_bytes)
    array.items[index].arrive(task, copy.site)
    targets = []
    for block in blocks:
        buffer = block.shared.get(own.key) or machine.allocate(block, own)
        barriers = block.shared.get(array.key) or machine.allocate(block, array)
        window = _part(target.within(buffer, env), part, count)
        machine.checks.aligned(copy, window, region, may_be_flat=False)
        copy.check_commit(window, writes=True)
        targets.append((window, barriers.items[index]))
    if fill is None:
        body = load_body(copy, _part(region, part, count), None, targets, num_bytes // count)
    else:  # The parts are of the window, of which only some lies inside the array.
        index = _part_index(whole.get().shape, part, count)
        body = load_body(copy, region, fill, targets, num_bytes // count, lambda x: x[index])
    copy.start(body)
    machine.pending_loads.append(copy)


def _part(region: Region, part: int, count: int) -> Region:
    """One of `count` equal parts of a region, along its first dimension that divides."""
    index = _part_index(region.get().shape, part, count)
    base = region.index
    narrow = (*region.steps, lambda array, _: array[base])
    return Region(region.buffer, narrow, index)


def _part_index(shape: tuple, part: int, count: int) -> tuple:
    for axis, size in enumerate(shape):
        if size % count == 0:
            step = size // count
            return (slice(None),) * axis + (slice(part * step, (part + 1) * step),)
    raise UnsupportedKernelError(f"a multicast copy of shape {shape} over {count} blocks")


@rule("commit_smem")
def _commit_smem(compiler: Compiler, eqn: Any) -> Step:
    return False, lambda task, env: task.commit()
