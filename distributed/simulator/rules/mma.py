"""Tensor core operations of Hopper: they read shared memory until they are waited for."""

from __future__ import annotations

from typing import Any

import numpy as np

from stretto.distributed.private_jax.column_tiles import are_side_by_side
from stretto.distributed.simulator.program import Compiler, Step, rule
from stretto.distributed.simulator.rules.arrays import matmul
from stretto.distributed.simulator.state.races import Access
from stretto.distributed.simulator.state.views import ViewPlan, plan_view
from stretto.distributed.sites import Site


class Matmul:
    """A tensor core operation under way, as the reader of its operands."""

    __slots__ = ("issuer",)

    def __init__(self, issuer: Any):
        self.issuer = issuer

    def describe(self) -> str:
        """The operation in words."""
        return f"the wgmma issued by {self.issuer.describe()}"


@rule("wgmma_ref")
def _wgmma_ref(compiler: Compiler, eqn: Any) -> Step:
    p = eqn.params
    trees = [p["acc_transforms_tree"], p["a_transforms_tree"], p["b_transforms_tree"]]
    leaves = list(eqn.invars[3:])
    views: list[ViewPlan] = []
    for atom, tree in zip(eqn.invars[:3], trees, strict=True):
        n = 0 if tree is None else tree.num_leaves
        transforms = () if tree is None else tree.unflatten(leaves[:n])
        in_columns = are_side_by_side(transforms)  # At last, of rhs.
        views.append(plan_view(compiler, atom, transforms[:-2] if in_columns else transforms))
        del leaves[:n]
    acc, a, b = views
    a_is_ref = hasattr(eqn.invars[1].aval, "inner_aval")
    site = compiler.site

    def step(task: Any, env: list) -> None:
        place = task.asyncs.start(task.clock)
        task.matmuls.append(place)
        target = acc.region(task, env)
        lhs = _operand(task, a, env, place, site) if a_is_ref else np.asarray(a.ref(env))
        rhs = _operand(task, b, env, place, site)
        if in_columns:
            rhs = np.concatenate(rhs, axis=1)
        begin = task.machine.now(task)
        flops = 2 * lhs.shape[0] * lhs.shape[1] * rhs.shape[1]
        task.machine.report.statistics.flops += flops
        task.machine.cost.matmul(task, flops)
        task.machine.note(task, "wgmma", begin)
        out = target.get()
        target.set(out + matmul(lhs, rhs, out.dtype))

    return False, step


def _operand(
    task: Any, view: ViewPlan, env: list, place: tuple[int, int], site: Site
) -> np.ndarray:
    """Reads an operand in shared memory, which the operation reads until it ends."""
    region = view.region(task, env)
    machine = task.machine
    access = Access(
        "wgmma's read", Matmul(task), site, task.device.index, task.clock, *place, is_async=True
    )
    machine.checks.committed(region, access, task.committed)
    machine.detector.read(region, access)
    return region.get()


def wait_matmuls(task: Any, allowed: int) -> None:
    """All but the last `allowed` tensor core operations of `task` are done."""
    done = len(task.matmuls) - allowed
    for place in task.matmuls[: max(done, 0)]:
        task.acquire_one(*place)
    if done > 0:
        del task.matmuls[:done]


@rule("wgmma_wait")
def _wgmma_wait(compiler: Compiler, eqn: Any) -> Step:
    allowed = eqn.params["n"]
    return False, lambda task, env: wait_matmuls(task, allowed)


@rule("wgmma_accumulator_deref")
def _deref(compiler: Compiler, eqn: Any) -> Step:
    allowed, (source,), (out,) = eqn.params["wait_n"], compiler.ins(eqn), compiler.outs(eqn)

    def step(task: Any, env: list) -> None:
        if allowed is not None:
            wait_matmuls(task, allowed)
        env[out] = np.array(env[source].data)

    return False, step


@rule("wgmma_accumulator_store")
def _store(compiler: Compiler, eqn: Any) -> Step:
    ref, value = compiler.ins(eqn)

    def step(task: Any, env: list) -> None:
        env[ref].data[...] = env[value]

    return False, step
