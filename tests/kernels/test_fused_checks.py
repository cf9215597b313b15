"""The checks of `tests/gpu`, small and in the simulator; and that they find what is wrong."""

from __future__ import annotations

import collective_checks
import fused_cases as cases
import fused_checks as checks
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import slow_peers

import stretto as st
from stretto.distributed.simulator import DeadlockError

everywhere = pytest.mark.parametrize("name", cases.OPERATIONS)


@pytest.fixture(autouse=True)
def simulation():
    with st.simulate(seed=4, core_count=2) as report:
        yield report
    assert report.ok, str(report)


@everywhere
def test_verify(name):
    problems = [(cases.whole(name, 2, m, k, n), {}) for m, k, n in [(16, 64, 64), (9, 8, 24)]]
    assert checks.verify(name, cases.mesh_of(2), problems) == []


@everywhere
def test_verify_finds_what_is_wrong(name, monkeypatch):
    right = cases.OPERATIONS[name]

    def wrong(lhs, rhs, axis_name, **options):
        out = right(lhs, rhs, axis_name, backend="xla")
        return out if options.get("backend") == "xla" else out.at[-1, -1].add(64)

    monkeypatch.setitem(cases.OPERATIONS, name, wrong)
    found = checks.verify(name, cases.mesh_of(2), [(cases.whole(name, 2, 4, 8, 8), {})])
    assert len(found) == 3
    assert "wrong elements" in found[0] and "max error" in found[1] and "sum error" in found[2]


def test_verify_finds_devices_that_differ(monkeypatch):
    name = "matmul_all_reduce"
    right = cases.OPERATIONS[name]

    def wrong(lhs, rhs, axis_name, **_):
        out = right(lhs, rhs, axis_name, backend="xla")
        return out.at[0, 0].multiply(1 + jax.lax.axis_index("x").astype(out.dtype) / 64)

    monkeypatch.setitem(cases.OPERATIONS, name, wrong)
    found = checks.verify(name, cases.mesh_of(2), [((8, 16, 8), {})])
    assert any("different bits" in line for line in found)


@pytest.mark.parametrize("bad", [np.nan, 9.0])
def test_a_number_that_is_none_is_no_small_error(bad):
    right = np.array([[0, 0, 1, 1, 1, 1]] * 2, np.float32)
    assert list(checks.judge("", right, right)) == []
    wrong = right.copy()
    wrong[1, 2] = bad
    assert len(list(checks.judge("", right, wrong))) == 1


def test_drawn_whole_numbers_sum_exactly():
    """At the largest sizes no partial sum comes near 256, beyond which bfloat16 has gaps."""
    lhs = checks.draw(jax.random.key(0), (64, 7168), whole=True, share=4)
    rhs = checks.draw(jax.random.key(1), (7168, 64), whole=True, share=2)
    product = np.asarray(lhs, np.float32) @ np.asarray(rhs, np.float32)
    assert 5 < product.std() < 256 / 8
    assert set(np.unique(np.asarray(lhs, np.float32))) == {-1, 0, 1}


@pytest.mark.parametrize("delay_s", [0, 0.002])
@everywhere
def test_launches(name, delay_s, simulation):
    program = checks.launches(
        name, cases.mesh_of(2), cases.whole(name, 2, 8, 64, 64), calls=3, delay_s=delay_s
    )
    assert not np.asarray(jax.jit(program)(jnp.int32(3))).any()
    assert simulation.launches == 3


@everywhere
def test_gradients(name):
    program = checks.gradients(name, cases.mesh_of(2), cases.whole(name, 2, 16, 64, 64))
    errors = np.asarray(jax.jit(program)(jnp.int32(5)))
    assert errors.shape == (2, 2, 2)
    assert (errors[:, 0] <= 2 * errors[:, 1] + 1e-3).all(), errors


@pytest.mark.parametrize("name", collective_checks.CALLS)
def test_collectives(name):
    operands = [((6, 5), "bfloat16"), ((4, 130), "float32")]
    assert collective_checks.compare(name, cases.mesh_of(2), operands) == []


def test_wrong_collectives_are_found(monkeypatch):
    def wrong(x, axis_name, backend):
        return st.all_gather(x, axis_name, backend="xla") * (1 if backend == "xla" else 2)

    monkeypatch.setitem(collective_checks.CALLS, "all_gather", wrong)
    found = collective_checks.compare("all_gather", cases.mesh_of(2), [((4, 4), "float32")])
    assert "wrong elements, by device" in found[0]


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
