"""The checks of `tests/gpu`, small and in the simulator; and that they find what is wrong."""

from __future__ import annotations

import dataclasses

import compiling
import fused_cases as cases
import gradient_checks
import jax
import jax.numpy as jnp
import launching
import numpy as np
import pytest
import slow_peers
import subjects
import verification
from selection import slow
from subjects import SUBJECTS
from verification import Problem

import stretto as st
from stretto.distributed.simulator import DeadlockError

QUICK = ("all_gather_matmul", "reduce_scatter")
everywhere = pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in SUBJECTS],
)
fused = pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in cases.FORMS],
)


@pytest.fixture(autouse=True)
def simulation():
    with st.simulate(seed=4, core_count=2) as report:
        yield report
    assert report.ok, str(report)


def wrong_subject(name, break_it):
    """The operation by XLA, its result broken unless XLA is asked for."""
    subject = SUBJECTS[name]

    def call(operands, axis, **options):
        out = subject.call(operands, axis, backend="xla")
        return out if options.get("backend") == "xla" else break_it(out)

    return dataclasses.replace(subject, call=call)


@everywhere
def test_verify(name, simulation):
    subject = SUBJECTS[name]
    problems = [Problem(subject, subject.sizes_of(2, *mkn)) for mkn in [(16, 64, 64), (9, 8, 24)]]
    outcomes = verification.verify(cases.mesh_of(2), problems)
    assert [outcome.flaws for outcome in outcomes] == [[], []]
    assert outcomes[0].label == f"{name} {'x'.join(map(str, problems[0].sizes))}"
    assert all(0 < ratio <= 2 for outcome in outcomes for ratio in outcome.ratios)
    assert len({bits for outcome in outcomes for sums in outcome.checksums for bits in sums}) >= 4
    assert simulation.launches == 4


@everywhere
def test_verify_finds_what_is_wrong(name):
    subject = wrong_subject(name, lambda out: out.at[-1, -1].add(64))
    problem = Problem(subject, subject.sizes_of(2, 4, 8, 8))
    (outcome,) = verification.verify(cases.mesh_of(2), [problem])
    assert len(outcome.flaws) == 3
    assert "wrong elements" in outcome.flaws[0]
    assert "max error" in outcome.flaws[1] and "sum error" in outcome.flaws[2]


@pytest.mark.parametrize("name", [slow("matmul_all_reduce"), "all_reduce", slow("all_gather")])
def test_verify_finds_devices_that_differ(name):
    def break_it(out):
        return out.at[0, 0].multiply(1 + jax.lax.axis_index("x").astype(out.dtype) / 64)

    subject = wrong_subject(name, break_it)
    problem = Problem(subject, subject.sizes_of(2, 4, 8, 8))
    (outcome,) = verification.verify(cases.mesh_of(2), [problem])
    assert "devices hold different bits" in outcome.flaws


def test_a_program_that_cannot_be_compiled_is_a_flaw_of_its_own():
    subject = SUBJECTS["all_reduce"]
    bad = Problem(SUBJECTS["all_gather_matmul"], (8, 8, 8), dict(backend="nonsense"))
    good = Problem(subject, (8, 8))
    outcomes = verification.verify(cases.mesh_of(2), [bad, good])
    assert "backend='nonsense'" in outcomes[0].flaws[0] and not outcomes[1].flaws


@pytest.mark.parametrize("bad", [np.nan, 9.0])
def test_a_number_that_is_none_is_no_small_error(bad):
    right = np.array([[0, 0, 1, 1, 1, 1]] * 2, np.float32)
    assert verification.judge("", right, right).flaws == []
    wrong = right.copy()
    wrong[1, 2] = bad
    assert len(verification.judge("", right, wrong).flaws) == 1


@pytest.mark.parametrize("dtype", ["bool", "int8", "bfloat16", "float32"])
def test_a_checksum_sees_one_bit_and_the_order(dtype):
    x = np.arange(12).astype(jnp.dtype(dtype)).reshape(3, 4)
    other = x.copy()
    other.view(np.uint8).flat[-1] ^= 1
    sums = [int(verification.checksum(jnp.asarray(y))) for y in (x, x[::-1], other)]
    assert len(set(sums)) == 3


def test_drawn_whole_numbers_sum_exactly():
    """At the largest sizes no partial sum comes near 256, beyond which bfloat16 has gaps."""
    lhs = subjects.draw(jax.random.key(0), (64, 7168), whole=True, share=4)
    rhs = subjects.draw(jax.random.key(1), (7168, 64), whole=True, share=2)
    product = np.asarray(lhs, np.float32) @ np.asarray(rhs, np.float32)
    assert 5 < product.std() < 256 / 8
    assert set(np.unique(np.asarray(lhs, np.float32))) == {-1, 0, 1}


@everywhere
def test_launches_that_are_all_verified(name, simulation):
    subject = SUBJECTS[name]
    sizes = subject.sizes_of(2, 8, 64, 64)
    program = jax.jit(launching.every_one_verified(subject, cases.mesh_of(2), sizes))
    assert compiling.run(program, 3, 3).tolist() == [0, 0]
    assert simulation.launches == 3


@everywhere
def test_launches_of_which_the_last_is_verified(name, simulation):
    subject = SUBJECTS[name]
    sizes = subject.sizes_of(2, 8, 64, 64)
    program = jax.jit(launching.last_one_verified(subject, cases.mesh_of(2), sizes))
    assert compiling.run(program, 3, 2, 1, 2000).tolist() == [0, 0]
    assert simulation.launches == 2


def test_wrong_launches_are_found():
    subject = wrong_subject("all_gather", lambda out: out.at[0, 0].add(1))
    mesh, sizes = cases.mesh_of(2), (4, 4)
    every = jax.jit(launching.every_one_verified(subject, mesh, sizes))
    assert compiling.run(every, 0, 3).tolist() == [3, 3]
    last = jax.jit(launching.last_one_verified(subject, mesh, sizes))
    assert compiling.run(last, 0, 3, 0, 0).tolist() == [1, 1]


@fused
def test_gradients(name):
    subject = SUBJECTS[name]
    program = gradient_checks.gradients(name, cases.mesh_of(2), subject.sizes_of(2, 16, 64, 64))
    errors = compiling.run(jax.jit(program), 5)
    assert errors.shape == (2, 2, 2)
    assert (errors[:, 0] <= 2 * errors[:, 1] + 1e-3).all(), errors


@pytest.mark.parametrize("semaphore", ["received", "released"])
def test_a_peer_that_drops_a_signal(semaphore):
    lhs, rhs = cases.operands(*cases.whole("all_gather_matmul", 2, 64, 64, 64))
    with (
        slow_peers.dropping(1, semaphore),
        pytest.raises(DeadlockError, match=semaphore),
        st.simulate(core_count=2),
    ):
        cases.run("all_gather_matmul", lhs, rhs)
    np.testing.assert_array_equal(
        cases.run("all_gather_matmul", lhs, rhs), cases.rounded(lhs @ rhs, jnp.bfloat16)
    )
