"""Control flow: calls, branches, and the ids of the task that runs."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import jax

from stretto.distributed.simulator.program import Compiler, Program, Step, rule
from stretto.distributed.simulator.reports.errors import KernelFaultError, UnsupportedKernelError
from stretto.distributed.simulator.state.registers import MOST
from stretto.distributed.simulator.state.waiting import Wait, wake
from stretto.distributed.sites import Site


def store(env: list, outs: list[int], values: list) -> None:
    """Puts results into their slots."""
    for out, value in zip(outs, values, strict=True):
        env[out] = value


def call_step(program: Program, ins: list[int], outs: list[int]) -> Step:
    """The step that runs `program` once on the operands."""
    if not program.yields:

        def call_now(task: Any, env: list) -> None:
            store(env, outs, program.run_now(task, [env[i] for i in ins]))

        return False, call_now

    def call(task: Any, env: list) -> Generator:
        store(env, outs, (yield from program.run(task, [env[i] for i in ins])))

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
            store(env, outs, choose(env).run_now(task, [env[i] for i in ins]))

        return False, cond_now

    def cond(task: Any, env: list) -> Generator:
        store(env, outs, (yield from choose(env).run(task, [env[i] for i in ins])))

    return True, cond


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

    def step(task: Any, env: list) -> Generator:
        yield
        registers, own, machine = task.block.registers, task.warpgroup, task.machine
        if count > MOST or not machine.checks.of_hardware:
            return  # More than a thread can have is told before the kernel starts.
        while not registers.has_room_for(own, count):  # Others may take what has become free.
            yield Wait(
                registers,
                lambda: registers.has_room_for(own, count),
                site,
                lambda: registers.describe(own, count),
                lambda: "let others set fewer, or this one",
            )
        registers.held[own] = count
        wake(registers, machine.scheduler)

    return True, step


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
def _check(compiler: Compiler, eqn: Any) -> Step | None:
    """`pl.debug_check`: under `pl.enable_debug_checks` it stops the kernel, else it is nothing."""
    if not eqn.params["debug"]:
        raise UnsupportedKernelError(
            "a check of checkify's, which Mosaic GPU refuses; use pl.debug_check"
        )
    if not jax.config.jax_pallas_enable_debug_checks:
        return None
    ins, tree, site = compiler.ins(eqn), eqn.params["err_tree"], compiler.site

    def step(task: Any, env: list) -> None:
        failure = jax.tree.unflatten(tree, [env[i] for i in ins]).get()
        if failure is not None:
            _stop(failure, site)

    return False, step


def _stop(why: str, site: Site) -> None:
    """Ends the kernel with an error, which finds `site` here (`site_of_error`)."""
    raise KernelFaultError(why)
