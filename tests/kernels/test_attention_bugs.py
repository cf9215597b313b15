"""Each step of the attention kernel is needed: without it the simulator, or a number, tells."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_kernel_cases import SMALL, Simulated, WithoutWaitFor, check, drawn, seen

import stretto as st
from stretto.distributed.semaphores import Semaphore
from stretto.distributed.simulator import SimulationError
from stretto.kernels.engine import gates
from stretto.kernels.engine.attention import even_shares
from stretto.kernels.engine.attention.visible import VisibleKeys
from stretto.kernels.engine.hopper.attention import attending, moving, softmax
from stretto.kernels.engine.hopper.attention.memory import Memory
from stretto.kernels.fused import attention, attention_keys
from stretto.kernels.fused.attention_config import Sequence

pytestmark = pytest.mark.usefixtures("traces_apart")
SLOW = pytest.mark.slow
SEEDS = range(3)
CAUSAL = Sequence(causal=True)


def on_one(seed):
    """What is found on one device, whose block makes several tiles; also if a number is wrong."""
    operands = drawn((1, 256, 2, 64), (1, 256, 1, 64), size=100.0)

    def body(q, k, v):
        return attention.attend(q, k, v, None, CAUSAL, scale=0.125, config=SMALL)

    try:
        with st.simulate(seed=seed, core_count=1, on_finding="record") as report:
            found = jax.block_until_ready(jax.jit(body)(*operands[:3]))
    except SimulationError as error:
        return error.report.kinds() | {"stopped"}
    return report.kinds() | numbers(found, operands)


def numbers(found, operands):
    try:
        length = operands[0].shape[1]
        check(
            [np.asarray(x, np.float64) for x in found],
            operands,
            seen(1, length, length, causal=True),
        )
    except AssertionError:
        return {"wrong numbers"}
    return set()


BARRIERS = {
    "queries full": lambda memory: memory.queries.full,
    "queries empty": lambda memory: memory.queries.empty,
    "keys full": lambda memory: memory.keys.full,
    "keys empty": lambda memory: memory.keys.empty,
    "values full": lambda memory: memory.values.full,
    "values empty": lambda memory: memory.values.empty,
    "filled": lambda memory: memory.filled,
    "free": lambda memory: memory.free,
}
QUICK = ("values empty",)


def leave_out(monkeypatch, name):
    """Nobody waits for these barriers."""
    barriers: list = []
    made = Memory.of

    def of(refs):
        memory = made(refs)
        barriers.append(BARRIERS[name](memory))
        return memory

    monkeypatch.setattr(Memory, "of", of)
    for module in (attending, moving):
        monkeypatch.setattr(module, "plgpu", WithoutWaitFor(module.plgpu, barriers))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else SLOW) for name in BARRIERS]
)
def test_each_barrier_is_needed(monkeypatch, name):
    leave_out(monkeypatch, name)
    assert any(on_one(seed) for seed in SEEDS)


@SLOW
def test_nothing_is_found_without_a_bug():
    assert not any(on_one(seed) for seed in SEEDS)


@SLOW
def test_turns_change_no_number(monkeypatch):
    """They are for speed: warpgroups that take none compute the same."""
    monkeypatch.setattr(attending, "_pass_turn", lambda memory, own: None)
    monkeypatch.setitem(BARRIERS, "turns", lambda memory: memory.turn)
    leave_out(monkeypatch, "turns")
    assert not on_one(0)


def keys_not_masked(monkeypatch):
    monkeypatch.setattr(VisibleKeys, "needs_mask", lambda *_: jnp.bool_(False))


def a_mask_off_by_one(monkeypatch):
    right = softmax.masked
    monkeypatch.setattr(
        attending.softmax, "masked", lambda scores, ahead, window: right(scores, ahead + 1, window)
    )


def results_not_rescaled(monkeypatch):
    right = softmax.scaled
    monkeypatch.setattr(softmax, "scaled", lambda x, by: x if x.shape[1] == 64 else right(x, by))


def large_weights_not_seen(monkeypatch):
    monkeypatch.setattr(softmax, "any_above", lambda *_: jnp.bool_(False))


@pytest.mark.parametrize(
    "bug",
    [
        a_mask_off_by_one,
        pytest.param(keys_not_masked, marks=SLOW),
        pytest.param(results_not_rescaled, marks=SLOW),
        large_weights_not_seen,
    ],
)
def test_wrong_arithmetic_gives_wrong_numbers(monkeypatch, bug):
    bug(monkeypatch)
    assert on_one(0) == {"wrong numbers"}


@SLOW
def test_a_table_that_has_a_tile_twice(monkeypatch):
    """And another one not at all: both stores of the one race."""
    right = even_shares.table

    def wrong(*given):
        found = right(*given).copy()
        found[0, 2] = found[0, 1]
        return found

    monkeypatch.setattr(attention.even_shares, "table", wrong)
    assert on_one(0) == {"race", "wrong numbers"}


# --- What stands between devices ------------------------------------------------------------------


def on_two(monkeypatch, bug):
    """What is found on two devices under several orders of steps."""
    bug(monkeypatch)
    program, operands = Simulated(2, CAUSAL, SMALL), drawn((1, 256, 1, 64), (1, 256, 1, 64))
    kinds = set()
    for seed in SEEDS:
        try:
            found, report = program(operands[:3], seed, on_finding="record")
            kinds |= report.kinds() | numbers(found, operands)
        except SimulationError as error:
            kinds |= error.report.kinds() | {"stopped"}
    return kinds


def no_wait_for(semaphore, fewer=None):
    """Nobody waits for it, or only for one signal `fewer`."""

    def bug(monkeypatch):
        original = Semaphore.wait

        def wait(self, value=1, **how):
            if self.site.semaphore != semaphore:
                original(self, value, **how)
            elif fewer is not None:
                original(self, value - fewer, **how)

        monkeypatch.setattr(Semaphore, "wait", wait)

    return bug


def no_signal_of(semaphore):
    def bug(monkeypatch):
        original = Semaphore.signal

        def signal(self, **how):
            if self.site.semaphore != semaphore:
                original(self, **how)

        monkeypatch.setattr(Semaphore, "signal", signal)

    return bug


def no_gate(monkeypatch):
    monkeypatch.setattr(gates.Gates, "go_through", lambda *_: None)


def values_for_keys(monkeypatch):
    right = attention_keys._Fetch.sources
    monkeypatch.setattr(attention_keys._Fetch, "sources", lambda self, ref: right(self, ref)[::-1])


PROTOCOL = {
    "nobody waits for keys": (no_wait_for("received"), "race"),
    "the last piece is not waited for": (no_wait_for("received", fewer=1), "race"),
    "loads do not wait at gates": (no_gate, "race"),
    "keys are not announced": (no_signal_of("received"), "stopped"),
    "a device ends while its keys are read": (no_wait_for("released"), "after end"),
    "values in place of keys": (values_for_keys, "wrong numbers"),
}
AT_ONCE = ("the last piece is not waited for",)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in AT_ONCE else SLOW) for name in PROTOCOL]
)
def test_each_step_between_devices_is_needed(monkeypatch, name):
    bug, kind = PROTOCOL[name]
    assert kind in on_two(monkeypatch, bug)
