"""Each step of the fused protocols is needed: without it the simulator finds what goes wrong.

A step is left out by replacing the function of the distributed layer that it goes through; the
kernels themselves are the ones that ship.
"""

from __future__ import annotations

import functools

import fused_cases as cases
import jax
import numpy as np
import pytest
from fused_cases import BF16, F32
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from selection import slow

import stretto as st
from stretto.distributed.memory import edges
from stretto.distributed.semaphores import Semaphore
from stretto.distributed.simulator import DeadlockError, SimulationError
from stretto.kernels.fused.pull_config import PullConfig

DEVICES = 3
SEEDS = range(3)
SCHEDULES = ("random", "pct", "round_robin")
AS_ONE = "all_gather_matmul, gathered as one matrix"
HANDSHAKE = {"opening": "before start", "observed": "semaphore not zero"}
# Semaphores of each kernel, and what is found if nobody waits for them.
PROTOCOLS = {
    "all_gather_matmul": {"received": "race", "released": "after end"} | HANDSHAKE,
    AS_ONE: {"received": "race", "released": "after end"},
    "all_gather_matmul_k": {"received": "race"},  # `released` is the same code.
    "matmul_reduce_scatter": {"produced": "race", "arrived": "race", "released": "after end"}
    | HANDSHAKE,
    # The steps before are those of the reduce-scatter, by the same code.
    "matmul_all_reduce": {"finished": "after end"},
}
# The handshake is one piece of code for all kernels, and so is what pulls rows.
COVERED = {("matmul_reduce_scatter", name) for name in HANDSHAKE}
COVERED |= {(AS_ONE, "released"), ("all_gather_matmul_k", "received")}
EACH = [
    pytest.param(name, semaphore, marks=[pytest.mark.slow] * ((name, semaphore) in COVERED))
    for name, found in PROTOCOLS.items()
    for semaphore in found
]
each_semaphore = pytest.mark.parametrize(("name", "semaphore"), EACH)


pytestmark = pytest.mark.usefixtures("traces_apart")


def simulator(name, semaphore=None):
    """The kernel, as a function of a seed: whether the numbers are right, and the report.

    It is traced once, when it first runs. It runs on so many multiprocessors that it uses
    `semaphore`: with room, it meets its peers by itself.
    """
    core_count = 4 if semaphore in HANDSHAKE else 2
    options = dict(out_dtype=F32)
    if name == AS_ONE:
        name, options["config"] = "all_gather_matmul", cases.AS_ONE
    program = jax.jit(cases.mapped(name, cases.mesh_of(DEVICES), **options))

    def simulate(seed):
        lhs, rhs = cases.operands(*cases.whole(name, DEVICES, 64, 64, 64), seed=seed)
        settings = dict(seed=seed, schedule=SCHEDULES[seed % 3], core_count=core_count)
        with st.simulate(on_finding="record", **settings) as report:
            out = np.asarray(program(lhs.astype(BF16), rhs.astype(BF16)))
        return np.array_equal(out, lhs @ rhs), report

    return simulate


def found(simulate, seed):
    """The kinds of what was found; "deadlock" where nothing moves any more, before the end."""
    try:
        return simulate(seed)[1].kinds()
    except SimulationError as error:
        return error.report.kinds() | {"deadlock"}


def leave_out(monkeypatch, method, semaphore, where=lambda: True):
    """Semaphore `semaphore` neither waits nor signals, as `method` says."""
    original = getattr(Semaphore, method)

    def maybe(self, *args, **kwargs):
        if self.site.semaphore != semaphore:
            original(self, *args, **kwargs)

    monkeypatch.setattr(Semaphore, method, maybe)


@pytest.mark.parametrize("name", PROTOCOLS)
def test_without_a_bug_nothing_is_found(name):
    simulate = simulator(name)
    for seed in SEEDS:
        right, report = simulate(seed)
        assert right and report.ok, str(report)


@pytest.mark.parametrize(  # What is found is the same of each: a wait that never ends.
    ("name", "semaphore"), [(*EACH[0].values,), *(slow(*each.values) for each in EACH[1:])]
)
def test_a_dropped_signal_is_a_deadlock(monkeypatch, name, semaphore):
    leave_out(monkeypatch, "signal", semaphore)
    simulate = simulator(name, semaphore)
    for seed in SEEDS:
        with pytest.raises(DeadlockError, match=rf"semaphore {semaphore}\S* >= "):
            simulate(seed)


@pytest.mark.slow  # Every device drops it in the test above.
@each_semaphore
def test_one_devices_dropped_signal_is_a_deadlock(monkeypatch, name, semaphore):
    original = Semaphore.signal

    def maybe(self, *args, **kwargs):
        if self.site.semaphore != semaphore:
            original(self, *args, **kwargs)
        else:
            pl.when(self.team.device_id() != 1)(lambda: original(self, *args, **kwargs))

    monkeypatch.setattr(Semaphore, "signal", maybe)
    with pytest.raises(DeadlockError, match=rf"semaphore {semaphore}\S* >= "):
        simulator(name, semaphore)(0)


@each_semaphore
def test_a_dropped_wait_is_found(monkeypatch, name, semaphore):
    """Nobody waits for data (a race), or for peers that still use one's memory (after the end)."""
    leave_out(monkeypatch, "wait", semaphore)
    simulate = simulator(name, semaphore)
    for seed in SEEDS:
        assert {PROTOCOLS[name][semaphore], "deadlock"} & found(simulate, seed)


@pytest.mark.slow  # No wait at all is the test above.
@each_semaphore
def test_a_wait_for_one_too_few_is_found(monkeypatch, name, semaphore):
    original = Semaphore.wait

    def impatient(self, value=1, **kwargs):
        fewer = 1 if self.site.semaphore == semaphore else 0
        original(self, value - fewer, **kwargs)

    monkeypatch.setattr(Semaphore, "wait", impatient)
    simulate = simulator(name, semaphore)
    kinds = set().union(*(found(simulate, seed) for seed in SEEDS))
    assert PROTOCOLS[name][semaphore] in kinds


@pytest.mark.slow  # A signal too few is the same deadlock.
@each_semaphore
def test_a_wait_for_one_too_many_is_a_deadlock(monkeypatch, name, semaphore):
    original = Semaphore.wait

    def greedy(self, value=1, **kwargs):
        more = 1 if self.site.semaphore == semaphore else 0
        original(self, value + more, **kwargs)

    monkeypatch.setattr(Semaphore, "wait", greedy)
    with pytest.raises(DeadlockError, match=rf"semaphore {semaphore}\S* >= "):
        simulator(name, semaphore)(0)


# The others store by the same code.
STORING = ("all_gather_matmul", "matmul_reduce_scatter")


@pytest.mark.parametrize("name", [name if name in STORING else slow(name) for name in PROTOCOLS])
def test_a_signal_before_its_data_is_found(monkeypatch, name):
    """Stores are waited for until they have been read, not until they are in place."""
    original = plgpu.wait_smem_to_gmem
    only_read = functools.partial(original, wait_read_only=True)
    monkeypatch.setattr(plgpu, "wait_smem_to_gmem", lambda n, wait_read_only=False: only_read(n))
    simulate = simulator(name)
    for seed in SEEDS:
        assert found(simulate, seed)


@pytest.mark.parametrize("devices", [slow(2), 3, slow(4)])
def test_pieces_that_run_on_are_found(monkeypatch, devices):
    """A piece as wide as two shards, which on 3 devices is as wide as what is gathered of a row.

    It is then contiguous, and not cut off at its shard's edge. On GPUs that gave wrong numbers.
    """
    monkeypatch.setattr(PullConfig, "piece_columns", lambda self, columns, _: self.pull_columns)
    name = "all_gather_matmul_k"
    lhs, rhs = cases.operands(*cases.whole(name, devices, 9, 72, 8))
    monkeypatch.setattr(edges, "check_stores", lambda jaxpr, kernel: None)
    with st.simulate(core_count=2, on_finding="record") as report:
        out = cases.run(name, lhs, rhs, devices=devices, out_dtype=F32)
    assert np.array_equal(out, lhs @ rhs) == (devices != 3)
    assert report.kinds() == ({"race", "stray copy"} if devices == 3 else set())
    if devices == 3:
        assert "copy_smem_to_gmem(self.buffers.at[slot], self._window(ref, row, column))" in str(
            report
        )


def test_pieces_that_run_on_are_refused(monkeypatch):
    monkeypatch.setattr(PullConfig, "piece_columns", lambda self, columns, _: self.pull_columns)
    lhs, rhs = cases.operands(9, 3 * 72, 3 * 8)
    with (
        st.simulate(core_count=2),
        pytest.raises(ValueError, match=r"of \(16, 1, 256\) is stored to .* \(9, 2, 128\)"),
    ):
        cases.run("all_gather_matmul_k", lhs, rhs, devices=3)


def test_data_from_the_wrong_device_is_wrong_numbers(monkeypatch):
    """The inputs tell devices apart: a peer too far along the ring gives another result."""
    from stretto.distributed.team import Team

    original = Team.neighbour
    monkeypatch.setattr(Team, "neighbour", lambda self, offset: original(self, -offset))
    right, _ = simulator("all_gather_matmul")(0)
    assert not right
