"""Messages through the heap, and a device's slot in it."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np

from stretto.distributed.primitives import messages, slots
from stretto.distributed.simulator.program import Compiler, Step, rule
from stretto.distributed.simulator.state.mail import Message, Slot
from stretto.distributed.simulator.state.waiting import Wait, wake


def _int32(value: int) -> int:
    """`value` as an int32 that has gone round."""
    return (int(value) + 2**31) % 2**32 - 2**31


@rule("stretto_slot_of_place")
def _slot_of_place(compiler: Compiler, eqn: Any) -> Step:
    (number,), (out,) = compiler.ins(eqn), compiler.outs(eqn)

    def step(task: Any, env: list) -> None:
        own, given = task.device.index, int(env[number])
        first = task.machine.places.setdefault(given, own)
        if first != own:
            raise ValueError(f"devices {first} and {own} were both told that they are {given}.")
        env[out] = own

    return False, step


def _team(compiler: Compiler, eqn: Any) -> slots.Steps:
    sizes = compiler.kernel.axis_sizes
    return slots.steps(list(sizes), list(sizes.values()), eqn.params["axes"])


@rule("stretto_member")
def _member(compiler: Compiler, eqn: Any) -> Step:
    (slot,), (out,), team = compiler.ins(eqn), compiler.outs(eqn), _team(compiler, eqn)

    def step(task: Any, env: list) -> None:
        env[out] = slots.member_of(int(env[slot]), team)

    return False, step


@rule("stretto_slot_of_member")
def _slot_of_member(compiler: Compiler, eqn: Any) -> Step:
    (slot, which), (out,), team = compiler.ins(eqn), compiler.outs(eqn), _team(compiler, eqn)

    def step(task: Any, env: list) -> None:
        env[out] = slots.slot_of(int(env[slot]), int(env[which]), team)

    return False, step


@rule("stretto_read_word")
def _read_word(compiler: Compiler, eqn: Any) -> Step:
    (slot, word), (out,) = compiler.ins(eqn), compiler.outs(eqn)

    def step(task: Any, env: list) -> Generator:
        yield
        env[out] = task.machine.mail.slot(int(env[slot])).counts.get(int(env[word]), 0)

    return True, step


@rule("stretto_write_word")
def _write_word(compiler: Compiler, eqn: Any) -> Step:
    slot, word, value = compiler.ins(eqn)

    def step(task: Any, env: list) -> Generator:
        yield
        counts = task.machine.mail.slot(int(env[slot])).counts
        counts[int(env[word])] = _int32(env[value])

    return True, step


@rule("stretto_post")
def _post(compiler: Compiler, eqn: Any) -> Step:
    x, slot, word, flag = compiler.ins(eqn)
    aval, site = eqn.invars[0].aval, compiler.site
    bare = eqn.params["bare"]
    words = messages.words_of_message(aval.size, aval.dtype, bare=bare)

    def step(task: Any, env: list) -> Generator:
        yield
        machine, target, first = task.machine, int(env[slot]), int(env[word])
        there: Slot = machine.mail.slot(target)
        access = task.access("message", site, "sys")
        for old in there.overlapping(first, first + words):
            machine.checks.message_overwritten(old, access, target)
        machine.count_link(task.device.index, target, 4 * words)
        value, launch = np.array(env[x]), machine.mail.launches
        clock = task.release()
        flagged = (first, first + words), _int32(env[flag])
        there.put(Message(*flagged, value, clock, access, launch, bare=bare))
        machine.report.statistics.signals += 1
        wake(there, machine.scheduler)

    return True, step


@rule("stretto_collect")
def _collect(compiler: Compiler, eqn: Any) -> Step:
    slot, word, flag, sender = compiler.ins(eqn)
    (out,), site = compiler.outs(eqn), compiler.site
    shape, dtype = eqn.params["shape"], np.dtype(eqn.params["dtype"])
    bare = eqn.params["bare"]

    def step(task: Any, env: list) -> Generator:
        yield
        machine, first, wanted = task.machine, int(env[word]), _int32(env[flag])
        here: Slot = machine.mail.slot(int(env[slot]))

        def found() -> Message | None:
            message = here.messages.get(first)
            if message is None or message.value.shape != shape or message.bare != bare:
                return None
            # One without flags is whatever has come and has not been zeroed.
            is_new = not message.reads if bare else message.flag == wanted
            return message if is_new else None

        machine.report.statistics.waits += 1
        machine.report.statistics.blocked_waits += found() is None
        while (message := found()) is None:
            yield Wait(
                here,
                lambda: found() is not None,
                site,
                lambda: (
                    f"a message of flag {wanted} from GPU {int(env[sender])} at word {first}, where"
                    f" there is {_describe(here.messages.get(first))}"
                ),
            )
        if message.launch == machine.mail.launches:
            task.acquire(message.clock)
        message.reads.append(task.access("receipt", site, "sys"))
        if bare:
            message.zeroed = False
            machine.mail.unfenced.setdefault(task, []).append(message)
        task.release()
        env[out] = message.value.astype(dtype)

    return True, step


@rule("stretto_fence_between_turns")
def _fence_between_turns(compiler: Compiler, eqn: Any) -> Step:
    (turn,) = compiler.ins(eqn)

    def step(task: Any, env: list) -> None:
        if int(env[turn]):
            for message in task.machine.mail.unfenced.pop(task, []):
                message.zeroed = True

    return False, step


def _describe(message: Message | None) -> str:
    if message is None:
        return "none"
    return f"one of flag {message.flag}, shape {message.value.shape}"
