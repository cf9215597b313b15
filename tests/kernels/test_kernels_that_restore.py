"""Fused matmuls leave their semaphores at zero, so that XLA has none to zero: in the simulator."""

from __future__ import annotations

import dataclasses

import fused_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scaled_cases
from fused_cases import BF16, F32
from selection import slow

import stretto as st
from stretto.distributed import kernel
from stretto.distributed.memory import heap
from stretto.distributed.semaphores import Semaphore
from stretto.distributed.simulator import SimulationError
from stretto.kernels.engine import remainder
from stretto.kernels.engine.hopper.tile_config import NARROW, TileConfig
from stretto.kernels.fused import (
    all_gather_matmul,
    all_gather_matmul_k,
    matmul_all_reduce,
    matmul_reduce_scatter,
)

SCATTER, REDUCE = "matmul_reduce_scatter", "matmul_all_reduce"
GATHER, COLUMNS = "all_gather_matmul", "all_gather_matmul_k"
CONFIGS = {
    SCATTER: matmul_reduce_scatter.Config,
    REDUCE: matmul_all_reduce.Config,
    GATHER: all_gather_matmul.Config,
    COLUMNS: all_gather_matmul_k.Config,
}
PAIR = TileConfig(tile_m=256, tile_n=128, num_stages=2, store_buffers=2)
SHARED = dataclasses.replace(NARROW, most_parts=4)
STEPS = 26  # Along the contraction, of shared tiles.

pytestmark = pytest.mark.usefixtures("traces_apart")


@pytest.fixture
def whatever_it_gains(monkeypatch):
    """Small products share their last wave, too."""
    monkeypatch.setattr(remainder, "LEAST_GAIN", -10.0)
    monkeypatch.setattr(remainder, "HELD", 2e7)


def calls_in_turn(devices, shared_steps):
    """Calls of several kernels and sizes, one after another: what each is, and its operands."""
    rows = 128, 64 * shared_steps, 256
    of_each = [
        (SCATTER, (16, 64, 72), {}),
        (GATHER, (72, 136, 72), {}),
        (REDUCE, (72, 64, 136), {}),
        (COLUMNS, (136, 64, 72), {}),
        (SCATTER, (264, 64, 136), dict(tiles=PAIR)),
        (REDUCE, (264, 64, 136), dict(tiles=PAIR)),
        (GATHER, (264, 64, 136), dict(tiles=PAIR)),
        (SCATTER, rows, dict(tiles=SHARED)),
        (GATHER, (16, 136, 72), dict(gather_first=True)),
        (REDUCE, rows, dict(tiles=SHARED, own_last=True)),
        (GATHER, rows, dict(tiles=SHARED)),
        (SCATTER, (16, 64, 72), {}),
    ]
    for seed, (name, sizes, config) in enumerate(of_each):
        operands = cases.operands(*cases.whole(name, devices, *sizes), seed=seed)
        yield name, CONFIGS[name](**config), operands


def run_in_turn(devices, shared_steps=STEPS, **settings):
    """Whether all are exact, twice in a row, in one program; and the simulator's report."""
    calls = list(calls_in_turn(devices, shared_steps))
    mesh = cases.mesh_of(devices)

    def program(operands):
        return [
            cases.mapped(name, mesh, config=config, out_dtype=F32, backend="pallas")(*given)
            for (name, config, _), given in zip(calls, operands, strict=True)
        ]

    operands = [tuple(jnp.asarray(x, BF16) for x in given) for *_, given in calls]
    program = jax.jit(program)
    with st.simulate(**settings) as report:
        found = [np.asarray(out) for _ in range(2) for out in program(operands)]
    wanted = [lhs @ rhs for *_, (lhs, rhs) in calls] * 2
    return all(map(np.array_equal, found, wanted)), report


# With 3 multiprocessors a kernel fills its device, and starts by XLA's barrier.
@pytest.mark.parametrize(
    ("devices", "core_count", "seed"),
    [(2, 3, 0), slow(1, 3, 0), slow(2, 3, 1), slow(2, 3, 2), slow(4, 3, 0), slow(4, 3, 1)],
)
@pytest.mark.usefixtures("whatever_it_gains")
def test_kernels_and_sizes_in_turn(devices, core_count, seed):
    schedule = ("random", "pct", "round_robin")[seed % 3]
    right, report = run_in_turn(devices, seed=seed, core_count=core_count, schedule=schedule)
    assert right and report.ok, str(report)


@pytest.mark.parametrize(("words", "seed"), [(0, 0), slow(1, 1), slow(5, 2)])
@pytest.mark.usefixtures("whatever_it_gains")
def test_what_the_heap_has_no_words_for(monkeypatch, words, seed):
    """XLA zeroes it; of a kernel's arrays some may have words and others none."""
    monkeypatch.setattr(heap, "WORDS", heap.COUNTERS + words)
    right, report = run_in_turn(2, seed=seed, core_count=3)
    assert right and report.ok, str(report)


def test_without_a_heap(monkeypatch):
    monkeypatch.setenv("STRETTO_HEAP", "0")
    right, report = run_in_turn(2, shared_steps=2, core_count=3)
    assert right and report.ok, str(report)


@pytest.mark.parametrize("seed", [0, slow(1)])
@pytest.mark.parametrize("name", [SCATTER, slow(REDUCE), GATHER, slow(COLUMNS)])
def test_a_start_by_counters(name, seed):
    """Where multiprocessors are left."""
    lhs, rhs = cases.operands(*cases.whole(name, 2, 64, 64, 64), seed=seed)
    with st.simulate(seed=seed, core_count=8) as report:
        for _ in range(2):
            out = cases.run(name, lhs, rhs, config=CONFIGS[name](), out_dtype=F32)
    assert report.ok, str(report)
    np.testing.assert_array_equal(out, lhs @ rhs)


@pytest.mark.parametrize("name", [SCATTER, slow(REDUCE), slow(GATHER)])
def test_in_8_bits(name):
    with st.simulate(core_count=3) as report:
        for _ in range(2):
            out, want = scaled_cases.run(name, "row", 2, (136, 200, 72))
    assert report.ok, str(report)
    np.testing.assert_array_equal(out, want)


@pytest.mark.parametrize(
    ("semaphore", "name", "tiles"),
    [
        ("produced", SCATTER, NARROW),
        ("arrived", SCATTER, NARROW),
        ("released", SCATTER, NARROW),
        ("finished", REDUCE, NARROW),
        ("given_sums", SCATTER, SHARED),
        ("awaited", GATHER, NARROW),
    ],
)
@pytest.mark.usefixtures("whatever_it_gains")
def test_what_is_not_subtracted_is_found(monkeypatch, semaphore, name, tiles):
    original = Semaphore.wait

    def wait(self, value=1, *, decrement=False):
        original(self, value, decrement=decrement and self.site.semaphore != semaphore)

    monkeypatch.setattr(Semaphore, "wait", wait)
    columns = 256 if tiles is SHARED else 64
    steps = STEPS if tiles is SHARED else 1
    lhs, rhs = cases.operands(*cases.whole(name, 2, 128, 64 * steps, columns))
    with (
        pytest.raises(SimulationError, match=f"semaphore {semaphore}.* ends at"),
        st.simulate(core_count=3),
    ):
        cases.run(name, lhs, rhs, config=CONFIGS[name](tiles=tiles))


def test_each_block_of_a_pair_has_what_it_waits_for(monkeypatch):
    """Both would subtract from one semaphore what only one of them is told."""

    monkeypatch.setattr(kernel, "block_in_cluster", lambda: 0)
    lhs, rhs = cases.operands(*cases.whole(SCATTER, 2, 264, 64, 136))
    with pytest.raises(SimulationError), st.simulate(core_count=4):
        cases.run(SCATTER, lhs, rhs, config=CONFIGS[SCATTER](tiles=PAIR))


@pytest.mark.parametrize("name", [GATHER, slow(COLUMNS)])
def test_without_zeros_an_all_gather_is_found(monkeypatch, name):
    """Several blocks wait for a piece, so none of them subtracts it."""
    monkeypatch.setattr(Semaphore, "zero", lambda self: None)
    lhs, rhs = cases.operands(*cases.whole(name, 2, 64, 64, 64))
    with pytest.raises(SimulationError, match=r"semaphore received.* ends at"), st.simulate():
        cases.run(name, lhs, rhs, config=CONFIGS[name]())


@pytest.mark.parametrize("name", [GATHER, slow(COLUMNS)])
def test_zeros_come_after_all_waits(monkeypatch, name):
    original = Semaphore.wait

    def wait(self, *args, **kwargs):
        if self.site.semaphore != "awaited":
            original(self, *args, **kwargs)

    monkeypatch.setattr(Semaphore, "wait", wait)
    lhs, rhs = cases.operands(*cases.whole(name, 2, 64, 64, 200))
    with (
        pytest.raises(SimulationError, match=r"race on semaphore received|semaphore received.* >="),
        st.simulate(core_count=2),
    ):
        cases.run(name, lhs, rhs, config=CONFIGS[name]())
