"""Collectives through the heap, simulated: numbers, turns over launches, what each step is for."""

from __future__ import annotations

import functools

import collective_checks as checks
import fused_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import stretto as st
from stretto.distributed import posting, recording
from stretto.distributed.memory import heap
from stretto.distributed.primitives import message_sending, messages, slots
from stretto.distributed.simulator import FindingError
from stretto.distributed.simulator.reports.errors import SimulationError
from stretto.kernels.choice import choose
from stretto.kernels.collectives import arrays, by_heap, summed_norm_by_heap
from stretto.kernels.operations import OPERATIONS
from stretto.kernels.problem.machine import Machine
from stretto.kernels.problem.problem import Problem, Types

CONFIG = by_heap.Config()
SUM = functools.partial(st.all_reduce, axis_name="x", config=CONFIG)
GATHER = functools.partial(st.all_gather, axis_name="x", config=CONFIG)


@pytest.fixture
def one_row_a_turn(monkeypatch, traces_apart):
    """So that a block of a small array takes several turns."""
    monkeypatch.setattr(by_heap, "ROWS_OF_A_TURN", 1)


@pytest.mark.parametrize(("devices", "dtype"), [(2, "bfloat16"), (3, "float32"), (2, "int32")])
def test_sums_are_those_of_all_devices_in_order(devices, dtype):
    x = checks.drawn((devices, 3, 700), dtype)
    with st.simulate(seed=1, core_count=3):
        found = checks.per_device(SUM, x)
    for one in found:
        checks.same_bits(one, np.sum(x.astype(np.float32), 0).astype(x.dtype))


@pytest.mark.parametrize("dtype", ["bfloat16", "uint8", "complex64"])
def test_everybody_has_every_part(dtype):
    x = checks.drawn((3, 5, 67), dtype)
    with st.simulate(seed=2, core_count=3):
        found = checks.per_device(functools.partial(GATHER, axis=1), x)
    for one in found:
        checks.same_bits(one, np.concatenate(list(x), 1))


def test_the_largest_of_all():
    x = checks.drawn((2, 300), "float32")
    with st.simulate(core_count=3):
        found = checks.per_device(
            functools.partial(arrays.all_reduce, axes=("x",), op="max", config=CONFIG), x
        )
    checks.same_bits(found[0], x.max(0))


def test_each_row_of_a_mesh_has_its_team():
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("y", "x"))
    x = checks.drawn((4, 300), "float32")

    def one(x):
        return SUM(x), st.all_gather(x, "y", config=CONFIG)

    program = jax.shard_map(
        one, mesh=mesh, in_specs=P(("y", "x")), out_specs=P(("y", "x")), check_vma=False
    )
    with st.simulate(seed=3, core_count=3):
        sums, gathered = map(np.asarray, jax.jit(program)(x))
    grid = x.reshape(2, 2, 300)
    for y in range(2):
        for place in range(2):
            device = 2 * y + place
            checks.same_bits(sums[device], grid[y].sum(0))
            checks.same_bits(gathered.reshape(4, 2, 300)[device], grid[:, place])


@pytest.mark.parametrize("seed", range(2))
def test_launches_and_turns_follow_each_other(one_row_a_turn, seed):
    """Three launches of several turns, on memory that holds what came before."""
    x = checks.drawn((2, 2300), "float32")
    with st.simulate(seed=seed, core_count=3) as report:
        for _ in range(3):
            found = checks.per_device(lambda x: SUM(SUM(x)), x)
            checks.same_bits(found[1], 2 * x.sum(0))
    assert report.launches == 6


def norm(x, residual, weight):
    return st.all_reduce_rms_norm(
        x, residual, weight, "x", epsilon=1e-3, config=summed_norm_by_heap.Config()
    )


@pytest.mark.compiles
@pytest.mark.parametrize(
    ("devices", "dtype", "of_residual", "of_weight"),
    [
        (2, "bfloat16", "bfloat16", "float32"),
        (3, "bfloat16", "float32", "bfloat16"),
        (2, "float32", "bfloat16", "float16"),
        (2, "float16", "float16", "float16"),
    ],
)
def test_sum_and_norm(devices, dtype, of_residual, of_weight):
    """Operands of other types than x's, too: a thread has the same elements of all of them."""
    m, n = 5, 1024
    x = checks.drawn((devices, m, n), dtype)
    residual, weight = checks.drawn((m, n), of_residual, 1), checks.drawn((n,), of_weight, 2)
    call = jax.shard_map(
        lambda x, *others: norm(x[0], *others),
        mesh=cases.mesh_of(devices),
        in_specs=(P("x"), P(), P()),
        out_specs=P(),
    )
    with st.simulate(seed=1, core_count=3):
        h, out = jax.jit(call)(x, residual, weight)
    wide = residual.astype(np.float64) + x.astype(np.float64).sum(0)
    checks.same_bits(np.asarray(h), wide.astype(residual.dtype))
    want = wide / np.sqrt((wide**2).mean(1, keepdims=True) + 1e-3) * weight.astype(np.float64)
    np.testing.assert_allclose(np.asarray(out, np.float64), want, rtol=1e-2)


# --- What each step is for ------------------------------------------------------------------------


def run_broken(x=checks.drawn((2, 2300), "float32"), seeds=3):  # noqa: B008
    program = jax.jit(
        jax.shard_map(
            SUM, mesh=cases.mesh_of(2), in_specs=P("x"), out_specs=P("x"), check_vma=False
        )
    )
    for seed in range(seeds):
        with st.simulate(seed=seed, core_count=3):
            checks.same_bits(np.asarray(program(x))[0], x.sum(0, x.dtype))


def test_a_half_that_is_not_the_turns_is_overwritten(one_row_a_turn, monkeypatch):
    right = posting.Mail._of_turn

    def always_first(self, before, turn, sender):
        flag, at = right(self, before, turn, sender)
        return flag, at - (before + turn & 1) * heap.HALF_WORDS

    monkeypatch.setattr(posting.Mail, "_of_turn", always_first)
    with pytest.raises(SimulationError, match=r"replaces the message|of flag"):
        run_broken()


def test_a_flag_that_is_not_the_turns_lets_an_old_message_pass(one_row_a_turn, monkeypatch):
    right = posting.Mail._of_turn

    def always_one(self, before, turn, sender):
        return before * 0 + 1, right(self, before, turn, sender)[1]

    monkeypatch.setattr(posting.Mail, "_of_turn", always_one)
    with pytest.raises((FindingError, AssertionError)):
        run_broken(checks.drawn((2, 2300), "int32"))


def test_without_the_count_the_next_launch_takes_the_last_ones_messages(traces_apart, monkeypatch):
    monkeypatch.setattr(posting.Mail, "close", lambda self, turns: None)
    x = checks.drawn((2, 2, 300), "int32")
    with pytest.raises((FindingError, AssertionError)), st.simulate(core_count=3):
        for one in x:
            checks.same_bits(checks.per_device(SUM, np.stack([one] * 2))[0], 2 * one)
            checks.same_bits(checks.per_device(SUM, x)[0], x.sum(0, x.dtype))


def test_what_was_zeroed_is_zero_before_the_next_turn_by_a_fence(one_row_a_turn, monkeypatch):
    """Of bare messages: zeros that come late would fall on the message two turns later."""
    monkeypatch.setattr(message_sending, "fence_between_turns", lambda turn: None)
    run_broken(checks.drawn((2, 2300), "int32"))  # Flags need none.
    with pytest.raises(SimulationError, match="may not have been zeroed yet"):
        run_broken()


def test_each_device_is_told_its_own_place(traces_apart, monkeypatch):
    monkeypatch.setattr(slots, "place", lambda: jnp.zeros(1, jnp.uint32))
    with pytest.raises(Exception, match="were both told that they are 0"):
        run_broken(seeds=1)


def test_all_of_a_turn_is_received_before_the_next_is_sent(one_row_a_turn, monkeypatch):
    """Sent a turn ahead, a message lands on one that its peer need not have read."""
    right = posting.Mail.send

    def ahead(self, x, turn, word=0):
        pl.when(turn == 0)(lambda: right(self, x, 0, word))
        right(self, x, turn + 1, word)

    monkeypatch.setattr(posting.Mail, "send", ahead)
    with pytest.raises(SimulationError, match="receive all of a turn before the next is sent"):
        run_broken(x=np.ones((2, 2300), np.float32))


# --- Limits, and what XLA sees --------------------------------------------------------------------


def problem(devices, **sizes):
    machine = Machine.of_kind("gpu", "NVIDIA H200")
    types = Types(lhs="bfloat16", rhs="bfloat16", out="bfloat16")
    return Problem(operation="any", sizes=sizes, types=types, devices=devices, machine=machine)


def test_what_the_heap_has_no_room_for_is_refused(monkeypatch):
    kernels = OPERATIONS["all_reduce_rms_norm"].kernels
    assert kernels[1].obstacle(problem(2, m=5, n=6144)) is None
    assert "up to 8192" in kernels[1].obstacle(problem(2, m=5, n=8704))
    assert "8 devices at most" in kernels[1].obstacle(problem(9, m=5, n=6144))
    assert "more than" in posting.obstacle(2, heap.FLAGGED_WORDS + 1)
    with pytest.raises(ValueError, match="num_blocks=121 must be from 1 to 120"):
        by_heap.Config(num_blocks=121).check()
    with pytest.raises(ValueError, match="multiple of 1024 bytes"):
        posting.words_of(100, jnp.float32)
    monkeypatch.setenv("STRETTO_HEAP", "0")
    assert "STRETTO_HEAP=0" in OPERATIONS["all_reduce"].kernels[1].obstacle(problem(2, m=5, n=5))


def test_halves_are_whole_units_and_all_of_them_fit_a_slot():
    for words in (heap.FLAGGED_WORDS, heap.BARE_WORDS, heap.MAIL):
        assert words > 0
        assert words % (messages.THREADS * messages.UNIT_WORDS) == 0
    last = heap.MAIL + heap.MAX_SENDERS * heap.CHANNELS * 2 * heap.HALF_WORDS
    assert last <= heap.SLOT_BYTES // 4
    most = posting.words_of(summed_norm_by_heap.MOST_COLUMNS, jnp.bfloat16, bare=True)
    assert most <= heap.BARE_WORDS


@pytest.mark.parametrize("axes", [("x",), ("y",), ("z", "x"), ("x", "y", "z")])
def test_slots_of_a_team(axes):
    names, sizes = ("z", "y", "x"), (2, 3, 2)
    team = slots.steps(names, sizes, axes)
    coordinates = np.stack(np.unravel_index(np.arange(12), sizes), 1)
    along = [names.index(axis) for axis in axes]
    for slot, where in enumerate(coordinates):
        member = np.ravel_multi_index(where[along], np.array(sizes)[along])
        assert slots.member_of(slot, team) == member
        for which in range(np.prod(np.array(sizes)[along])):
            there = where.copy()
            there[along] = np.unravel_index(which, np.array(sizes)[along])
            assert slots.slot_of(slot, which, team) == np.ravel_multi_index(there, sizes)


def test_a_recorded_program_has_no_place_for_kernels_that_read_their_peers():
    x = checks.drawn((2, 600), "float32")

    def program(call):
        mesh = cases.mesh_of(2)
        return st.recorded(
            jax.shard_map(call, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
        )

    with st.simulate(core_count=3) as report:
        found = program(functools.partial(st.all_reduce, axis_name="x"))(x)
        checks.same_bits(np.asarray(found)[1], x.sum(0))
        assert report.launches == 1
        inner = jax.jit(functools.partial(st.all_reduce, axis_name="x"))
        program_outside = jax.shard_map(
            inner, mesh=cases.mesh_of(2), in_specs=P("x"), out_specs=P("x"), check_vma=False
        )
        jax.jit(program_outside)(x)  # Traced for the other kernel, and anew for a recorded program.
        checks.same_bits(np.asarray(program(inner)(x))[0], x.sum(0))
        assert report.launches == 3
        scattered = program(lambda x: st.reduce_scatter(x[0], "x"))(x)
        checks.same_bits(np.asarray(scattered), x.sum(0))
        assert report.launches == 3  # It was XLA's.
        with pytest.raises(NotImplementedError, match=r"stretto\.recorded has no place for it"):
            program(lambda x: arrays.reduce_scatter(x[0], axes=("x",), axis=0)).lower(x)
        with pytest.raises(NotImplementedError, match=r"stretto\.recorded has no place for it"):
            program(lambda x: arrays.reduce_scatter(x[0], axes=("x",), axis=0))(x)
    assert not recording.is_active()


@pytest.mark.parametrize(
    ("name", "devices", "sizes", "backend", "reason"),
    [
        ("all_reduce", 2, dict(m=128, n=4096), "pallas", "up to 1024 KiB"),
        ("all_reduce", 2, dict(m=129, n=4096), "xla", "up to 1024 KiB only"),
        ("all_reduce", 4, dict(m=8, n=512), "xla", "timed on two GPUs"),
        ("all_reduce_rms_norm", 2, dict(m=1, n=6144), "pallas", "faster"),
        ("all_reduce_rms_norm", 2, dict(m=4096, n=8192), "pallas", "faster"),
        ("all_reduce_rms_norm", 2, dict(m=4097, n=8192), "xla", "up to 65536 KiB only"),
        ("reduce_scatter", 2, dict(m=8, n=512), "xla", "reads its peers' operands"),
    ],
)
def test_what_auto_takes_in_a_recorded_program(name, devices, sizes, backend, reason):
    with recording.recording():
        choice = choose.choose(OPERATIONS[name], problem(devices, **sizes), "auto")
    assert choice.backend == backend and reason in choice.reason
    assert backend == "xla" or isinstance(choice.config, by_heap.Config)


@pytest.mark.parametrize(
    ("name", "devices", "sizes", "is_through_heap"),
    [
        ("all_reduce_rms_norm", 2, dict(m=1, n=6144), True),
        ("all_reduce_rms_norm", 2, dict(m=512, n=6144), True),
        ("all_reduce_rms_norm", 2, dict(m=513, n=6144), False),
        ("all_reduce_rms_norm", 2, dict(m=6, n=16384), False),  # No room for such a row.
        ("all_reduce_rms_norm", 4, dict(m=6, n=6144), False),
        ("all_reduce", 2, dict(m=8, n=512), True),
        ("all_reduce", 2, dict(m=8, n=511), False),  # No whole messages.
        ("all_reduce", 2, dict(m=129, n=4096), False),
        ("all_gather", 2, dict(m=64, n=512), True),
        ("all_gather", 2, dict(m=65, n=512), False),
        ("reduce_scatter", 2, dict(m=8, n=512), False),
    ],
)
def test_what_auto_takes_in_a_program_that_is_not_recorded(name, devices, sizes, is_through_heap):
    """On two H200s a sum of 4 KB took 10 us so, 23 by the other kernel, and 15 through XLA."""
    choice = choose.choose(OPERATIONS[name], problem(devices, **sizes), "auto")
    assert isinstance(choice.config, by_heap.Config) == is_through_heap
    assert choice.backend == "pallas" or not is_through_heap
