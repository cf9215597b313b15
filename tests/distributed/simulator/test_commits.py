"""Loads and stores take another path to shared memory than copies: `commit_smem` between them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed.simulator import simulate

F32 = jnp.float32
X = np.arange(8 * 128, dtype=np.float32).reshape(8, 128)
SMEM = plgpu.SMEM((8, 128), F32)
SEEDS = range(5)


def run(body, *, scratch, seed=0, out=(8, 128), **kernel):
    """Runs a kernel of X on one device; returns (result, report)."""
    struct = jax.ShapeDtypeStruct(out, F32)
    with simulate(seed=seed, on_finding="record") as report:
        result = plgpu.kernel(body, out_type=struct, scratch_types=scratch, **kernel)(X)
        return jax.block_until_ready(result), report


def commit_if(condition):
    if condition:
        plgpu.commit_smem()


@pytest.mark.parametrize("commits", [(), (0,), (1,), (2,), (3,), (0, 2, 3)])
def test_a_store_and_a_load_over_it(commits):
    def body(x_ref, out_ref, smem, landed):
        commit_if(0 in commits)
        smem[...] = jnp.zeros_like(smem)
        commit_if(1 in commits)
        plgpu.copy_gmem_to_smem(x_ref, smem, landed)
        commit_if(2 in commits)
        plgpu.barrier_wait(landed)
        commit_if(3 in commits)
        out_ref[...] = smem[...]

    for seed in SEEDS:
        out, report = run(body, scratch=[SMEM, plgpu.Barrier()], seed=seed)
        if 1 in commits:
            assert report.ok and not report.warnings, str(report)
            np.testing.assert_array_equal(out, X)
            continue
        (finding,) = report.findings
        assert finding.kind == "uncommitted store" and "race on smem" in str(finding)
        assert "smem[...] = jnp.zeros_like(smem)" in str(finding)
        assert "plgpu.copy_gmem_to_smem(x_ref, smem, landed)" in str(finding)


@pytest.mark.parametrize("where", ["nowhere", "storing", "copying"])
@pytest.mark.parametrize("says_by", ["barrier", "semaphore"])
@pytest.mark.parametrize("copies_in", [True, False])
def test_another_warpgroup_may_commit(where, says_by, copies_in):
    def body(x_ref, out_ref, smem, stored, landed, stored_sem):
        @pl.when(lax.axis_index("wg") == 0)
        def _():
            smem[...] = x_ref[...]
            commit_if(where == "storing")
            if says_by == "barrier":
                plgpu.barrier_arrive(stored)
            else:
                pl.semaphore_signal(stored_sem)

        @pl.when(lax.axis_index("wg") == 1)
        def _():
            if says_by == "barrier":
                plgpu.barrier_wait(stored)
            else:
                pl.semaphore_wait(stored_sem)
            commit_if(where == "copying")
            if copies_in:
                plgpu.copy_gmem_to_smem(x_ref, smem, landed)
                plgpu.barrier_wait(landed)
                out_ref[...] = smem[...]
            else:
                plgpu.copy_smem_to_gmem(smem, out_ref)
                plgpu.wait_smem_to_gmem(0)

    scratch = [SMEM, plgpu.Barrier(), plgpu.Barrier(), plgpu.SemaphoreType.REGULAR]
    for seed in SEEDS:
        _, report = run(body, scratch=scratch, seed=seed, num_threads=2, thread_name="wg")
        want = {"uncommitted store"} if where == "nowhere" else set()
        assert report.kinds() == want and not report.warnings, str(report)


@pytest.mark.parametrize("committed", [True, False])
@pytest.mark.parametrize("stored_from_it", [True, False])
def test_a_load_and_a_copy_over_it(committed, stored_from_it):
    """A copy out of the same memory, which needs no commit, does not stand for the load."""

    def body(x_ref, out_ref, smem, landed):
        plgpu.copy_gmem_to_smem(x_ref, smem, landed)
        plgpu.barrier_wait(landed)
        total = smem[...]
        commit_if(committed)
        if stored_from_it:
            plgpu.copy_smem_to_gmem(smem, out_ref)
            plgpu.wait_smem_to_gmem(0)
        plgpu.copy_gmem_to_smem(x_ref, smem, landed)
        plgpu.barrier_wait(landed)
        out_ref[...] = total + smem[...]

    out, report = run(body, scratch=[SMEM, plgpu.Barrier()])
    assert report.ok, str(report)
    np.testing.assert_array_equal(out, 2 * X)
    if committed:
        assert not report.warnings
        return
    (warning,) = report.warnings
    assert warning.kind == "uncommitted load" and "total = smem[...]" in str(warning)


@pytest.mark.parametrize("committed", [True, False])
def test_a_store_and_a_multicast_copy_over_it(committed):
    """The copy of one block overwrites what the other has stored to its own shared memory."""

    def body(x_ref, out_ref, smem, stored, landed):
        smem[...] = jnp.ones_like(smem)
        commit_if(committed)
        plgpu.barrier_arrive(stored)
        plgpu.barrier_wait(stored)
        plgpu.copy_gmem_to_smem(x_ref, smem, landed, collective_axes="c")
        plgpu.barrier_wait(landed)
        out_ref[lax.axis_index("c")] = smem[...]

    cluster = dict(cluster=(2,), cluster_names=("c",))
    scratch = [SMEM, plgpu.ClusterBarrier(collective_axes=("c",)), plgpu.Barrier()]
    out, report = run(body, scratch=scratch, out=(2, 8, 128), **cluster)
    assert report.kinds() == (set() if committed else {"uncommitted store"}), str(report)
    np.testing.assert_array_equal(out, [X, X])


@pytest.mark.parametrize("committed", [True, False])
def test_an_atomic_update_is_a_store(committed):
    def body(x_ref, out_ref, smem, landed):
        plgpu.copy_gmem_to_smem(x_ref, smem, landed)
        plgpu.barrier_wait(landed)
        plgpu.atomic_add(smem, jnp.ones_like(smem))
        commit_if(committed)
        plgpu.copy_smem_to_gmem(smem, out_ref)
        plgpu.wait_smem_to_gmem(0)

    out, report = run(body, scratch=[SMEM, plgpu.Barrier()])
    assert report.kinds() == (set() if committed else {"uncommitted store"}), str(report)
    np.testing.assert_array_equal(out, X + 1)
