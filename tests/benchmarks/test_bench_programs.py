"""Loops that are timed: every call runs, one after another, on the operands that it should."""

from __future__ import annotations

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bench_cases import case_of
from jax.sharding import NamedSharding

from stretto.benchmarks.cases.candidate import Candidate
from stretto.benchmarks.cases.case import Case
from stretto.benchmarks.cases.meshes import joined, mesh_of
from stretto.benchmarks.cases.shapes import shapes_of
from stretto.benchmarks.peers.peers import PEERS
from stretto.benchmarks.timing import programs
from stretto.benchmarks.timing import timers as timing
from stretto.benchmarks.timing.compiling import Compiler
from stretto.benchmarks.timing.operands import Operands
from stretto.distributed.tools import aot
from stretto.kernels.operation import Operand
from stretto.kernels.operations import OPERATIONS
from stretto.kernels.problem.routing import Routing

DEVICES = 4
BLOCK = (8, 16)
OPERAND = Operand(shape=BLOCK)


def operands_of(mesh, dtype, seed=0) -> Operands:
    return Operands(mesh, dtype, Compiler(), seed)


def relative_error(ours, theirs, mesh) -> float:
    out = jax.ShapeDtypeStruct(ours.shape, ours.dtype, sharding=NamedSharding(mesh, joined(mesh)))
    error = programs.error_program(mesh, out).compile()
    return float(error(*(jax.device_put(x, out.sharding) for x in (ours, theirs))))


def test_rows_that_no_expert_has_are_not_compared(mesh):
    """`expert_dispatch` leaves them undefined: here NaN in one program's result."""
    sizes = np.array([2, 0, 3, 1], np.int32)
    rows = np.arange(DEVICES * 4.0, dtype=np.float32).reshape(-1, 1)
    unrouted = np.concatenate([np.arange(4) >= size for size in sizes])

    def results(fill: float, shift: float = 0.0):
        one = np.where(unrouted[:, None], np.float32(fill), rows + np.float32(shift))
        counts = np.zeros(DEVICES, np.int32)
        return one, Routing(counts, sizes, counts, counts, counts)

    sharding = NamedSharding(mesh, joined(mesh))
    ours, theirs, shifted = (
        jax.tree.map(lambda x: jax.device_put(x, sharding), results(*how))
        for how in ((np.nan,), (7.0,), (7.0, 1.0))
    )
    out = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), ours)
    defined = OPERATIONS["expert_dispatch"].examples.defined
    error = programs.error_program(mesh, out, defined).compile()
    assert float(error(ours, theirs)) == 0.0
    assert float(error(shifted, theirs)) > 0.05


@pytest.fixture
def mesh():
    return mesh_of(DEVICES)


def test_each_call_adds_its_results_corner_to_the_token(mesh):
    """Sets are used in turn, none is left out, and no call of the loop is dropped or merged."""
    candidate = Candidate(body=lambda x: 2 * x, operands=(OPERAND,))
    operands = operands_of(mesh, "float32")
    sets = operands.sets(candidate, 3)
    described = operands.describe(candidate)
    run = programs.traced(candidate, mesh, described, num_sets=3, rounds=5).lower().compile()
    token, out = run(programs.first_token(mesh), *(operand for (operand,) in sets))
    corners = [np.asarray(operand)[:: BLOCK[0], :1] for (operand,) in sets]
    np.testing.assert_allclose(np.asarray(token), 2 * (5 * sum(corners) + corners[0]), rtol=1e-5)
    np.testing.assert_allclose(np.asarray(out), 2 * np.asarray(sets[0][0]), rtol=1e-5)


@pytest.mark.optimised
@pytest.mark.skipif(not aot.is_available(), reason="needs the aot dependency group")
@pytest.mark.parametrize("peer", ["xla", "matmul", "xla-windowed"])
def test_on_a_gpu_calls_follow_each_other_and_copy_no_operand(peer):
    """Compiled for GPUs: XLA merges no calls, hoists none, and starts none before the last."""
    mesh = aot.mesh_of_gpus((DEVICES,), ("x",))
    case = case_of(shape="1024x512x2048", devices=DEVICES, dtype="bfloat16")
    candidate = PEERS[peer].candidates(case, mesh)[0]
    described = Operands(mesh, "bfloat16", Compiler()).describe(candidate)
    program = programs.traced(candidate, mesh, described, num_sets=3, rounds=10).lower()
    text = program.compile(compiler_options=dict(candidate.compiler_options)).as_text()
    parts = re.split(r"\n(?=\S)", text)
    body = max(parts, key=lambda part: part.count("get-tuple-element("))
    if peer != "xla-windowed":  # that one copies a shard to begin with, which is its own affair
        assert not re.findall(r"= bf16\[\S* copy\(", text)
    gathers = [m.start() for m in re.finditer(r" all-gather(-start)?\(", body)]
    tokens = [m.start() for m in re.finditer(r"%loop_add_fusion\S* = f32\[1,1\]", body)]
    assert len(tokens) == 3
    if peer == "xla":
        assert len(gathers) == 3
        assert gathers[0] < tokens[0] < gathers[1] < tokens[1] < gathers[2] < tokens[2]
    if peer == "xla-windowed":
        assert not gathers
        assert "collective-permute" in text


def test_operands_differ_between_devices_and_places_but_not_between_runs(mesh):
    first = np.asarray(operands_of(mesh, "float32").get(OPERAND, 0))
    again = np.asarray(operands_of(mesh, "float32").get(OPERAND, 0))
    other_place = np.asarray(operands_of(mesh, "float32").get(OPERAND, 1))
    other_seed = np.asarray(operands_of(mesh, "float32", seed=1).get(OPERAND, 0))
    np.testing.assert_array_equal(first, again)
    for block in range(1, DEVICES):
        assert not np.array_equal(first[: BLOCK[0]], first[block * BLOCK[0] :][: BLOCK[0]])
    assert not np.array_equal(first, other_place)
    assert not np.array_equal(first, other_seed)


def test_one_sets_blocks_can_be_read_as_rows_or_as_columns(mesh):
    operands = operands_of(mesh, "bfloat16")
    rows, columns = operands.get(OPERAND, 0), operands.get(OPERAND, 0, 1)
    assert rows.shape == (DEVICES * BLOCK[0], BLOCK[1])
    assert columns.shape == (BLOCK[0], DEVICES * BLOCK[1])
    np.testing.assert_array_equal(
        np.asarray(rows[: BLOCK[0]], np.float32), np.asarray(columns[:, : BLOCK[1]], np.float32)
    )


def test_whole_number_types(mesh):
    values = np.asarray(operands_of(mesh, "int32").get(OPERAND, 0))
    assert values.min() < 0 < values.max()


def test_relative_error(mesh):
    ours = operands_of(mesh, "float32").get(OPERAND, 0)
    assert relative_error(ours, ours, mesh) == 0
    # The worst device's, not the mean.
    worse = ours.at[-1].add(jnp.linalg.norm(ours[-BLOCK[0] :]) / np.sqrt(BLOCK[1]))
    assert relative_error(worse, ours, mesh) == pytest.approx(1.0, rel=1e-3)
    broken = ours.at[0, 0].set(jnp.nan)
    assert relative_error(broken, ours, mesh) == float("inf")


def test_small_operands_rotate_and_large_ones_do_not():
    assert programs.number_of_sets(20_000_000) == 6
    assert programs.number_of_sets(50_000_000) == 3
    assert programs.number_of_sets(10**9) == 1
    assert programs.number_of_sets(1) == 2  # nothing rotates it out of the L2


def test_rounds_per_run():
    assert timing.rounds_per_run(400.0, 1, on_gpu=True) == 15
    assert timing.rounds_per_run(10.0, 2, on_gpu=True) == timing.MOST_CALLS / 2
    assert timing.rounds_per_run(400.0, 4, on_gpu=True) == 4
    assert timing.rounds_per_run(50_000.0, 1, on_gpu=True) == 1
    assert timing.rounds_per_run(10.0, 1, on_gpu=False) == 1


def test_a_timer_gives_times_of_a_call(monkeypatch):
    """Ten calls a run, runs that complete every 30 us; the first interval is dropped."""
    clock = iter([0.0, 1.0, 1.00003, 1.00006, 1.00009])
    next(clock)
    monkeypatch.setattr(timing, "_completion", lambda token: next(clock))
    runs = []

    def program(token, operand):
        runs.append(token)
        return token + 1, operand

    timer = timing.LoopTimer(program, jnp.zeros(1), [jnp.zeros(1)], calls=10, queued=True)
    assert timer.visit(3) == pytest.approx([3.0, 3.0, 3.0])
    assert len(runs) == 4
    assert [int(token[0]) for token in runs] == [0, 1, 2, 3]


def both_ways(operation) -> tuple[Candidate, Candidate]:
    """The operation as it serves itself, and by XLA."""
    sizes = min(shapes_of("tiny", operation, DEVICES), key=lambda s: math.prod(s.values()))
    case = Case(operation=operation, sizes=sizes, dtype="float32", devices=DEVICES)
    ours, theirs = (
        Candidate(body=case.call(backend), operands=case.operands) for backend in ("auto", "xla")
    )
    return ours, theirs


@pytest.mark.parametrize("name", OPERATIONS)
def test_operation_public_and_unfused_are_one_program_on_a_cpu(name, mesh):
    """`backend="auto"` is XLA here, so this holds the wrapper to the reference, for every one."""
    operands = operands_of(mesh, "float32")
    ours, theirs = (
        programs.traced(one, mesh, operands.describe(one), num_sets=1, rounds=1).lower().as_text()
        for one in both_ways(OPERATIONS[name])
    )
    assert ours == theirs


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "matmul_reduce_scatter" else pytest.mark.slow)
        for name in OPERATIONS
    ],
)
def test_operation_public_and_unfused_agree_on_a_cpu(name, mesh):
    ours, theirs = both_ways(OPERATIONS[name])
    operands = operands_of(mesh, "float32").sets(ours, 1)[0]
    results = [programs.run_once(one, mesh, operands) for one in (ours, theirs)]
    assert relative_error(*results, mesh) < 1e-6


def test_the_windowed_peer_computes_the_same(mesh):
    for kernel in ("all_gather_matmul", "matmul_reduce_scatter"):
        case = case_of(kernel, "64x32x16", DEVICES)
        windowed = PEERS["xla-windowed"].candidates(case, mesh)[0]
        unfused = PEERS["xla"].candidates(case, mesh)[0]
        operands = operands_of(mesh, "float32")
        ours = programs.run_once(windowed, mesh, operands.sets(windowed, 1)[0])
        theirs = programs.run_once(unfused, mesh, operands.sets(unfused, 1)[0])
        for mine, other in zip(ours.addressable_shards, theirs.addressable_shards, strict=True):
            np.testing.assert_allclose(np.asarray(mine.data), np.asarray(other.data), rtol=1e-4)


def test_maximum_over_one_process_is_itself():
    assert timing.maximum_over_processes(np.asarray([3.0, 1.0])).tolist() == [3.0, 1.0]
    assert timing.agreed(True)
    assert not timing.agreed(False)
    assert jax.process_count() == 1
