"""Scopes that follow each other have the same memory and the same barriers, as they were left."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed.simulator import DeadlockError, simulate

F32 = jnp.float32
X = np.arange(8 * 128, dtype=np.float32).reshape(8, 128)
SMEM = plgpu.SMEM((8, 128), F32)
SEEDS = range(4)


def run(body, *, scratch=(), seed=0, out=(8, 128), **kernel):
    """Runs a kernel of X on one device; returns (result, report)."""
    struct = jax.ShapeDtypeStruct(out, F32)
    with simulate(seed=seed, on_finding="record") as report:
        result = plgpu.kernel(body, out_type=struct, scratch_types=scratch, **kernel)(X)
        return jax.block_until_ready(result), report


# --- Memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("waits", ["in the scope", "in the next one", "after both", "nowhere"])
@pytest.mark.parametrize("second", [SMEM, plgpu.SMEM((16, 128), jnp.bfloat16)])
def test_a_store_that_outlives_its_scope(waits, second):
    """It reads what the next scope may have overwritten already."""

    def body(x_ref, out_ref):
        def first(smem):
            smem[...] = x_ref[...]
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(smem, out_ref)
            if waits == "in the scope":
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        def next_one(other):
            if waits == "in the next one":
                plgpu.wait_smem_to_gmem(0)
            other[...] = jnp.zeros_like(other)

        pl.run_scoped(first, SMEM)
        pl.run_scoped(next_one, second)
        if waits != "nowhere":
            plgpu.wait_smem_to_gmem(0)

    for seed in SEEDS:
        _, report = run(body, seed=seed)
        if waits in ("in the scope", "in the next one"):
            assert report.ok and not report.warnings, str(report)
            continue
        race = next(str(f) for f in report.findings if f.kind == "race")
        assert "race on other" in race
        assert "plgpu.copy_smem_to_gmem(smem, out_ref)" in race
        assert "other[...] = jnp.zeros_like(other)" in race


@pytest.mark.parametrize("apart", [False, True])
def test_a_load_that_outlives_its_scope(apart):
    """Unless the next scope has other memory, because one between them is still open."""

    def body(x_ref, out_ref, landed):
        def first(smem):
            plgpu.copy_gmem_to_smem(x_ref, smem, landed)
            if apart:
                pl.run_scoped(next_one, SMEM)

        def next_one(other):
            other[...] = jnp.zeros_like(other)
            plgpu.barrier_wait(landed)
            out_ref[...] = other[...]

        pl.run_scoped(first, SMEM)
        if not apart:
            pl.run_scoped(next_one, SMEM)

    for seed in SEEDS:
        _, report = run(body, scratch=[plgpu.Barrier()], seed=seed)
        if apart:
            assert report.ok and not report.warnings, str(report)
        else:
            race = next(str(f) for f in report.findings if f.kind == "race")
            assert "plgpu.copy_gmem_to_smem(x_ref, smem, landed)" in race
            assert "other[...]" in race


@pytest.mark.parametrize("commits", [False, True])
@pytest.mark.parametrize("stores", [False, True])
def test_a_store_in_one_scope_and_a_copy_over_it_in_the_next(commits, stores):
    def body(x_ref, out_ref, landed):
        def first(smem):
            if stores:
                smem[...] = x_ref[...]
            if commits:
                plgpu.commit_smem()

        def next_one(other):
            plgpu.copy_gmem_to_smem(x_ref, other, landed)
            plgpu.barrier_wait(landed)
            out_ref[...] = other[...]

        pl.run_scoped(first, SMEM)
        pl.run_scoped(next_one, SMEM)

    out, report = run(body, scratch=[plgpu.Barrier()])
    np.testing.assert_array_equal(out, X)
    if commits or not stores:
        assert report.ok and not report.warnings, str(report)
        return
    (finding,) = report.findings
    assert finding.kind == "uncommitted store"
    assert "smem[...] = x_ref[...]" in str(finding) and "in a scope that has ended" in str(finding)


def test_what_an_earlier_scope_has_stored_is_not_there_to_be_read():
    def body(x_ref, out_ref):
        pl.run_scoped(lambda smem: smem.__setitem__(..., x_ref[...]), SMEM)
        pl.run_scoped(lambda other: out_ref.__setitem__(..., other[...]), SMEM)

    assert run(body)[1].kinds() == {"uninitialised"}


@pytest.mark.parametrize("waits", [True, False])
def test_a_loop_of_scopes_with_two_slots_around_it(waits):
    """The memory before the scope's own is not the scope's."""

    def body(x_ref, out_ref, outer):
        def turn(i, _):
            def inner(smem):
                if waits:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                smem[...] = x_ref[...]
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(smem, out_ref.at[i])

            pl.run_scoped(inner, SMEM)

        outer[...] = x_ref[...]
        lax.fori_loop(0, 4, turn, None)
        plgpu.wait_smem_to_gmem(0)

    _, report = run(body, scratch=[SMEM], out=(4, 8, 128))
    assert report.kinds() == (set() if waits else {"race"}), str(report)


# --- Barriers -------------------------------------------------------------------------------------


def test_a_barrier_is_left_a_phase_ahead():
    """The next scope's wait ends at once, or never if the copy has landed before it."""

    def body(x_ref, out_ref, smem):
        def first(begun):
            plgpu.copy_gmem_to_smem(x_ref, smem, begun)
            plgpu.barrier_wait(begun)
            plgpu.barrier_arrive(begun)

        def next_one(landed):
            plgpu.copy_gmem_to_smem(x_ref, smem, landed)
            plgpu.barrier_wait(landed)
            out_ref[...] = smem[...]

        pl.run_scoped(first, plgpu.Barrier())
        pl.run_scoped(next_one, plgpu.Barrier())

    kinds = set()
    for seed in range(10):
        try:
            kinds |= run(body, scratch=[SMEM], seed=seed)[1].kinds()
        except DeadlockError as error:
            assert "waits for barrier landed" in str(error)
            kinds.add("deadlock")
    assert kinds == {"race", "unawaited copy", "deadlock"}


@pytest.mark.parametrize("same_kind", [True, False])
def test_a_barrier_is_left_with_an_arrival(same_kind):
    """A barrier of another kind is another one."""

    def body(x_ref, out_ref):
        pl.run_scoped(plgpu.barrier_arrive, plgpu.Barrier(num_arrivals=2))

        def next_one(met):
            plgpu.barrier_arrive(met)
            plgpu.barrier_wait(met)
            out_ref[...] = x_ref[...]

        arrivals = 2 if same_kind else 3
        pl.run_scoped(next_one, plgpu.Barrier(num_arrivals=arrivals, num_barriers=()))

    if same_kind:
        assert run(body)[1].ok
    else:
        with pytest.raises(DeadlockError, match="1 of 3 arrivals"):
            run(body)


@pytest.mark.parametrize("all_wait", [True, False])
def test_a_warpgroup_that_did_not_wait_in_an_earlier_scope(all_wait):
    """Its phase is one behind, so its next wait ends at once."""

    def body(x_ref, out_ref, smem):
        wg = lax.axis_index("wg")

        def first(landed):
            @pl.when(wg == 0)
            def _():
                plgpu.copy_gmem_to_smem(x_ref, smem, landed)

            @pl.when((wg == 0) | all_wait)
            def _():
                plgpu.barrier_wait(landed)

        def next_one(landed):
            @pl.when(wg == 0)
            def _():
                plgpu.copy_gmem_to_smem(x_ref, smem, landed)

            plgpu.barrier_wait(landed)

            @pl.when(wg == 1)
            def _():
                out_ref[...] = smem[...]

        pl.run_scoped(first, plgpu.Barrier(), collective_axes="wg")
        pl.run_scoped(next_one, plgpu.Barrier(), collective_axes="wg")

    kernel = dict(scratch=[SMEM], num_threads=2, thread_name="wg")
    for seed in SEEDS:
        if all_wait:
            out, report = run(body, seed=seed, **kernel)
            assert report.ok and not report.warnings, str(report)
            np.testing.assert_array_equal(out, X)
        else:
            try:
                assert "race" in run(body, seed=seed, **kernel)[1].kinds()
            except DeadlockError as error:
                assert "waits for barrier landed" in str(error)


def test_a_late_wait_knows_no_more_than_an_early_one():
    """The barrier has gone on twice, so its parity is the same; what came later is not known."""

    def body(x_ref, out_ref, done):
        wg = lax.axis_index("wg")

        @pl.when(wg == 0)
        def _():
            plgpu.barrier_arrive(done)
            out_ref[0] = x_ref[0]
            plgpu.barrier_arrive(done)
            plgpu.barrier_arrive(done)

        @pl.when(wg == 1)
        def _():
            plgpu.barrier_wait(done)
            out_ref[1] = out_ref[0]

    for seed in range(8):
        _, report = run(body, scratch=[plgpu.Barrier()], seed=seed, num_threads=2, thread_name="wg")
        assert "race" in report.kinds(), seed
