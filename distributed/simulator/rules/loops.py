"""Loops, also those that poll until something changes."""

from __future__ import annotations

import functools
from collections.abc import Generator
from typing import Any

import numpy as np

from stretto.distributed.simulator.program import Compiler, Program, Step, rule, to_scalar
from stretto.distributed.simulator.reports.errors import StepLimitError
from stretto.distributed.simulator.reports.flaws import inner_jaxprs
from stretto.distributed.simulator.rules.arrays import ELEMENTWISE
from stretto.distributed.simulator.rules.control import store
from stretto.distributed.simulator.state.waiting import Wait
from stretto.distributed.sites import Site

# What a loop may do and still be one that only looks. Others may do so too; they are known to act.
_LOOKS = ELEMENTWISE | {
    "get", "load", "semaphore_read", "barrier_test", "delay",
    "axis_index", "program_id", "num_programs",
    "convert_element_type", "select_n", "broadcast_in_dim", "reshape", "squeeze", "slice",
    "reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or",
    "jit", "pjit", "closed_call", "cond", "while", "scan",
}  # fmt: skip


def _only_looks(jaxpr: Any) -> bool:
    """Whether nothing in `jaxpr`, nor in what it calls, changes what another task could see."""
    return all(
        eqn.primitive.name in _LOOKS and all(map(_only_looks, inner_jaxprs(eqn)))
        for eqn in jaxpr.eqns
    )


@rule("while")
def _while(compiler: Compiler, eqn: Any) -> Step:
    p, invars = eqn.params, eqn.invars
    n_cond, n_body = p["cond_nconsts"], p["body_nconsts"]
    cond = compiler.sub(p["cond_jaxpr"], [*invars[:n_cond], *invars[n_cond + n_body :]])
    body = compiler.sub(p["body_jaxpr"], invars[n_cond:])
    ins, outs, site = compiler.ins(eqn), compiler.outs(eqn), compiler.site
    only_looks = _only_looks(p["cond_jaxpr"]) and _only_looks(p["body_jaxpr"])
    run = functools.partial(_looking, site=site) if only_looks else _acting

    def start(env: list) -> tuple[list, list, list]:
        values = [env[i] for i in ins]
        return values[:n_cond], values[n_cond : n_cond + n_body], values[n_cond + n_body :]

    if cond.yields or body.yields:

        def loop(task: Any, env: list) -> Generator:
            store(env, outs, (yield from run(task, cond, body, start(env))))

        return True, loop

    def loop_now(task: Any, env: list) -> None:
        cond_consts, body_consts, carry = start(env)
        passes = 0
        while cond.run_now(task, cond_consts + carry)[0]:
            carry = body.run_now(task, body_consts + carry)
            passes += 1
            if passes > task.machine.scheduler.max_steps:
                raise StepLimitError(
                    f"the loop at {site} has gone round max_steps={passes - 1} times. Raise"
                    " max_steps, or see to it that its condition can become false."
                )
        store(env, outs, carry)

    return False, loop_now


def _acting(
    task: Any, cond: Program, body: Program, values: tuple[list, list, list]
) -> Generator[Any, None, list]:
    """A loop that does something: others may run in each pass, and so between its looks."""
    cond_consts, body_consts, carry = values
    scheduler = task.machine.scheduler
    while True:
        steps = scheduler.steps
        (goes_on,) = yield from cond.run(task, cond_consts + carry)
        if not goes_on:
            return carry
        carry = yield from body.run(task, body_consts + carry)
        if scheduler.steps == steps:
            task.polled = True
            yield


def _looking(
    task: Any, cond: Program, body: Program, values: tuple[list, list, list], *, site: Site
) -> Generator[Any, None, list]:
    """A loop that only reads. After a pass without effect it waits until another task has acted.

    A pass has no effect if it leaves the loop's values unchanged, and has seen no barrier's phase
    end: the next pass would do the same. So loops that wait for each other are a deadlock at once,
    and not only when all steps are used up.
    """
    cond_consts, body_consts, carry = values
    scheduler = task.machine.scheduler
    with scheduler.looking(task):
        while True:
            seen, steps, phases = scheduler.changes, scheduler.steps, task.waits_of_warps()
            (goes_on,) = yield from cond.run(task, cond_consts + carry)
            if not goes_on:
                return carry
            before = carry
            carry = yield from body.run(task, body_consts + carry)
            task.polled = True
            if all(map(_same, before, carry)) and task.waits_of_warps() == phases:
                yield from _wait_for_change(task, seen, site)
            elif scheduler.steps == steps:
                yield


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    return type(a) is type(b) and isinstance(a, int | np.ndarray) and np.array_equal(a, b)


def _wait_for_change(task: Any, seen: int, site: Site) -> Generator:
    scheduler = task.machine.scheduler
    yield Wait(
        scheduler,
        lambda: scheduler.changes != seen,
        site,
        lambda: "what ends its loop: it has looked, and nothing has changed since",
    )
    task.time = max(task.time, scheduler.time_of_change)


def _scan_parts(params: dict, num_in: int) -> tuple[int, int]:
    """Numbers of constants and of carried values of a scan."""
    if "ft_in" in params:
        consts, carry, _ = params["ft_in"].update(list(range(num_in))).unpack()
        return len(list(consts)), len(list(carry))
    return params["num_consts"], params["num_carry"]


@rule("scan")
def _scan(compiler: Compiler, eqn: Any) -> Step:
    p = eqn.params
    n_consts, n_carry = _scan_parts(p, len(eqn.invars))
    length, n_xs = p["length"], len(eqn.invars) - n_consts - n_carry
    tags = [compiler.tag(v) for v in eqn.invars[: n_consts + n_carry]] + [None] * n_xs
    body = compiler.sub(p["jaxpr"], tags=tags)
    ins, outs = compiler.ins(eqn), compiler.outs(eqn)
    ys_avals = [v.aval for v in eqn.outvars[n_carry:]]
    order = range(length - 1, -1, -1) if p["reverse"] else range(length)

    def start(env: list) -> tuple[list, list, list, list]:
        values = [env[i] for i in ins]
        ys = [np.empty(a.shape, a.dtype) for a in ys_avals]
        return values[:n_consts], values[n_consts : n_consts + n_carry], values[-n_xs:], ys

    def inputs(consts: list, carry: list, xs: list, i: int) -> list:
        if not n_xs:
            return consts + carry
        return consts + carry + [to_scalar(x[i]) if x.ndim == 1 else x[i] for x in xs]

    def collect(results: list, ys: list, i: int) -> list:
        for y, value in zip(ys, results[n_carry:], strict=True):
            y[i] = value
        return results[:n_carry]

    if not body.yields:

        def scan_now(task: Any, env: list) -> None:
            consts, carry, xs, ys = start(env)
            for i in order:
                carry = collect(body.run_now(task, inputs(consts, carry, xs, i)), ys, i)
            store(env, outs, carry + ys)

        return False, scan_now

    def scan(task: Any, env: list) -> Generator:
        consts, carry, xs, ys = start(env)
        for i in order:
            carry = collect((yield from body.run(task, inputs(consts, carry, xs, i))), ys, i)
        store(env, outs, carry + ys)

    return True, scan
