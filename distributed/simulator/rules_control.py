"""Control flow: calls, branches, loops, and the ids of the task that runs."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np

from stretto.distributed.simulator.errors import UnsupportedKernelError
from stretto.distributed.simulator.program import Compiler, Program, Step, rule, to_scalar


def _store(env: list, outs: list[int], values: list) -> None:
    for out, value in zip(outs, values, strict=True):
        env[out] = value


def call_step(program: Program, ins: list[int], outs: list[int]) -> Step:
    """The step that runs `program` once on the operands."""
    if not program.yields:

        def call_now(task: Any, env: list) -> None:
            _store(env, outs, program.run_now(task, [env[i] for i in ins]))

        return False, call_now

    def call(task: Any, env: list) -> Generator:
        _store(env, outs, (yield from program.run(task, [env[i] for i in ins])))

    return True, call


_CALLS = (
    "jit",
    "pjit",
    "closed_call",
    "core_call",
    "remat",
    "remat2",
    "checkpoint",
    "custom_jvp_call",
    "custom_vjp_call",
    "custom_vjp_call_jaxpr",
    "eval_jaxpr",
    "custom_lin",
)


@rule(*_CALLS)
def _call(compiler: Compiler, eqn: Any) -> Step:
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if name in eqn.params:
            program = compiler.sub(eqn.params[name], eqn.invars)
            return call_step(program, compiler.ins(eqn), compiler.outs(eqn))
    raise UnsupportedKernelError("a call without a jaxpr")


@rule("custom_vmap_call")
def _custom_vmap_call(compiler: Compiler, eqn: Any) -> Step:
    program = compiler.sub(eqn.params["call"], eqn.invars)
    return call_step(program, compiler.ins(eqn), compiler.outs(eqn))


@rule("cond")
def _cond(compiler: Compiler, eqn: Any) -> Step:
    branches = [compiler.sub(b, eqn.invars[1:]) for b in eqn.params["branches"]]
    which, *ins = compiler.ins(eqn)
    outs, last = compiler.outs(eqn), len(branches) - 1

    def choose(env: list) -> Program:
        return branches[min(max(int(env[which]), 0), last)]

    if not any(b.yields for b in branches):

        def cond_now(task: Any, env: list) -> None:
            _store(env, outs, choose(env).run_now(task, [env[i] for i in ins]))

        return False, cond_now

    def cond(task: Any, env: list) -> Generator:
        _store(env, outs, (yield from choose(env).run(task, [env[i] for i in ins])))

    return True, cond


@rule("while")
def _while(compiler: Compiler, eqn: Any) -> Step:
    p, invars = eqn.params, eqn.invars
    n_cond, n_body = p["cond_nconsts"], p["body_nconsts"]
    cond = compiler.sub(p["cond_jaxpr"], [*invars[:n_cond], *invars[n_cond + n_body :]])
    body = compiler.sub(p["body_jaxpr"], invars[n_cond:])
    if cond.yields:
        raise UnsupportedKernelError("a loop condition that synchronises")
    ins, outs = compiler.ins(eqn), compiler.outs(eqn)

    def start(env: list) -> tuple[list, list, list]:
        values = [env[i] for i in ins]
        return values[:n_cond], values[n_cond : n_cond + n_body], values[n_cond + n_body :]

    if not body.yields:

        def while_now(task: Any, env: list) -> None:
            cond_consts, body_consts, carry = start(env)
            while cond.run_now(task, cond_consts + carry)[0]:
                carry = body.run_now(task, body_consts + carry)
            _store(env, outs, carry)

        return False, while_now

    def loop(task: Any, env: list) -> Generator:
        cond_consts, body_consts, carry = start(env)
        while cond.run_now(task, cond_consts + carry)[0]:
            carry = yield from body.run(task, body_consts + carry)
        _store(env, outs, carry)

    return True, loop


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
            _store(env, outs, carry + ys)

        return False, scan_now

    def scan(task: Any, env: list) -> Generator:
        consts, carry, xs, ys = start(env)
        for i in order:
            carry = collect((yield from body.run(task, inputs(consts, carry, xs, i))), ys, i)
        _store(env, outs, carry + ys)

    return True, scan


@rule("axis_index")
def _axis_index(compiler: Compiler, eqn: Any) -> Step:
    (out,), name = compiler.outs(eqn), eqn.params["axis_name"]
    compiler.kernel.communicates |= name in compiler.kernel.axis_sizes

    def step(task: Any, env: list) -> None:
        env[out] = task.axis_index(name)

    return False, step


@rule("stretto_place")
def _place(compiler: Compiler, eqn: Any) -> Step:
    (index,), (out,) = compiler.ins(eqn), compiler.outs(eqn)

    def step(task: Any, env: list) -> None:
        env[out] = env[index]

    return False, step


@rule("program_id")
def _program_id(compiler: Compiler, eqn: Any) -> Step:
    (out,), axis = compiler.outs(eqn), eqn.params["axis"]
    names = [*compiler.kernel.mesh.shape]

    def step(task: Any, env: list) -> None:
        env[out] = task.axis_index(names[axis])

    return False, step


@rule("num_programs")
def _num_programs(compiler: Compiler, eqn: Any) -> Step:
    (out,) = compiler.outs(eqn)
    size = [*compiler.kernel.mesh.shape.values()][eqn.params["axis"]]

    def step(task: Any, env: list) -> None:
        env[out] = size

    return False, step


@rule("debug_print")
def _debug_print(compiler: Compiler, eqn: Any) -> Step:
    fmt = eqn.params["fmt"]
    ins = compiler.ins(eqn)

    def step(task: Any, env: list) -> None:
        task.machine.print(task, fmt.format(*(env[i] for i in ins)))

    return False, step


@rule("delay")
def _delay(compiler: Compiler, eqn: Any) -> Step:
    (nanos,) = compiler.ins(eqn)

    def step(task: Any, env: list) -> Generator:
        begin = task.machine.now(task)
        task.time += float(env[nanos]) * 1e-9
        task.machine.note(task, "delay", begin)
        yield

    return True, step


@rule("set_max_registers")
def _set_max_registers(compiler: Compiler, eqn: Any) -> Step:
    count, site = eqn.params["n"], compiler.site

    def step(task: Any, env: list) -> None:
        task.block.registers.setdefault(task.warpgroup, []).append(count)
        task.machine.checks.registers(task.block, site)

    return False, step


def _nothing(compiler: Compiler, eqn: Any) -> None:
    """An equation that changes nothing that a simulation can see."""


for _name in (
    "async_prefetch",
    "print_layout",
    "griddepcontrol_wait",
    "griddepcontrol_launch_dependents",
):
    rule(_name)(_nothing)


@rule("check")
def _check(compiler: Compiler, eqn: Any) -> Step:
    raise UnsupportedKernelError("checkify in a kernel")
