"""Blocks of a cluster reach into each other's shared memory: `cluster_ref`, `async_store_smem`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed.simulator import DeadlockError, simulate

X = np.arange(2 * 64 * 32, dtype=np.int32).reshape(2, 64, 32)


def run(body, scratch=(), *, seed=0, **settings):
    barriers = [
        plgpu.ClusterBarrier(collective_axes=("c",), num_arrivals=1),
        plgpu.Barrier(num_arrivals=1),
    ]
    with simulate(on_finding="record", seed=seed) as report:
        kernel = plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct(X.shape, X.dtype),
            scratch_types=[plgpu.SMEM(X.shape[1:], X.dtype), *barriers, *scratch],
            cluster=(2,),
            cluster_names=("c",),
            **settings,
        )
        out = np.asarray(kernel(X))
    return out, report


def swap_rows(waits=True, **store):
    """A kernel in which each block of a cluster stores its rows to the other's shared memory."""

    def body(x_ref, out_ref, smem, cluster_barrier, landed):
        me = lax.axis_index("c")
        if store:
            smem[...] = jnp.full(smem.shape, 10, jnp.int32)
            plgpu.barrier_arrive(cluster_barrier)
            plgpu.barrier_wait(cluster_barrier)
        plgpu.async_store_smem(
            x_ref[me], smem, landed, cluster_idx=1 - me, cluster_dim="c", **store
        )
        if waits:
            plgpu.barrier_wait(landed)
        out_ref[me] = smem[...]
        if not waits:
            plgpu.barrier_wait(landed)

    return body


@pytest.mark.parametrize("seed", range(5))
def test_rows_come_from_the_other_block(seed):
    out, report = run(swap_rows(), seed=seed)
    assert report.ok, str(report)
    np.testing.assert_array_equal(out, X[::-1])


@pytest.mark.parametrize(
    ("atomic", "want"),
    [
        ("add", X[::-1] + 10),
        ("max", np.maximum(X[::-1], 10)),
        ("min", np.minimum(X[::-1], 10)),
        ("and", X[::-1] & 10),
        ("or", X[::-1] | 10),
        ("xor", X[::-1] ^ 10),
    ],
)
def test_reductions(atomic, want):
    out, report = run(swap_rows(atomic=atomic))
    assert report.ok, str(report)
    np.testing.assert_array_equal(out, want)


def test_reading_before_the_wait_is_a_race():
    _, report = run(swap_rows(waits=False))
    assert "race" in report.kinds(), str(report)
    race = next(f for f in report.findings if f.kind == "race")
    assert "the asynchronous store to smem" in str(race)
    assert "plgpu.async_store_smem(" in str(race) and "out_ref[me] = smem[...]" in str(race)


def test_storing_before_the_other_block_is_ready_is_a_race():
    """Its own first store is not ordered before the one that comes from outside."""

    def body(x_ref, out_ref, smem, cluster_barrier, landed):
        me = lax.axis_index("c")
        smem[...] = jnp.zeros(smem.shape, jnp.int32)
        plgpu.async_store_smem(x_ref[me], smem, landed, cluster_idx=1 - me, cluster_dim="c")
        plgpu.barrier_wait(landed)
        out_ref[me] = smem[...]

    assert any("race" in run(body, seed=seed)[1].kinds() for seed in range(5))


def test_reductions_of_two_warpgroups_do_not_race():
    def body(x_ref, out_ref, smem, cluster_barrier, landed, zeroed, both):
        me, wg = lax.axis_index("c"), lax.axis_index("wg")

        @pl.when(wg == 0)
        def _():
            smem[...] = jnp.zeros(smem.shape, jnp.int32)
            plgpu.barrier_arrive(cluster_barrier)
            plgpu.barrier_wait(cluster_barrier)

        plgpu.barrier_arrive(zeroed)
        plgpu.barrier_wait(zeroed)
        plgpu.async_store_smem(
            x_ref[me] + wg, smem, both, cluster_idx=1 - me, cluster_dim="c", atomic="add"
        )
        plgpu.barrier_wait(both)

        @pl.when(wg == 0)
        def _():
            out_ref[me] = smem[...]

    scratch = [plgpu.Barrier(num_arrivals=2), plgpu.Barrier(num_arrivals=2)]
    out, report = run(body, scratch, num_threads=2, thread_name="wg")
    assert report.ok, str(report)
    np.testing.assert_array_equal(out, 2 * X[::-1] + 1)


def test_the_barrier_is_that_of_the_target():
    """Who waits at a barrier that nobody stores to waits for ever."""

    def body(x_ref, out_ref, smem, cluster_barrier, landed):
        me = lax.axis_index("c")

        @pl.when(me == 1)  # From both it would be one arrival more than the barrier expects.
        def _():
            plgpu.async_store_smem(x_ref[me], smem, landed, cluster_idx=0, cluster_dim="c")

        plgpu.barrier_wait(landed)
        out_ref[me] = smem[...]

    with pytest.raises(DeadlockError, match="device 0 block 1") as error:
        run(body)
    assert "nobody has arrived in this phase" in str(error.value)


@pytest.mark.parametrize("meets", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_a_block_must_not_end_while_another_looks(meets, seed):
    """Its values are there all the same: whether it has ended by then is a matter of luck."""

    def body(x_ref, out_ref, smem, cluster_barrier, landed):
        me = lax.axis_index("c")
        smem[...] = x_ref[me]
        plgpu.barrier_arrive(cluster_barrier)
        plgpu.barrier_wait(cluster_barrier)
        out_ref[me] = plgpu.cluster_ref(smem, {"c": 1 - me})[...]
        if meets:
            plgpu.barrier_arrive(cluster_barrier)
            plgpu.barrier_wait(cluster_barrier)

    out, report = run(body, seed=seed)
    np.testing.assert_array_equal(out, X[::-1])
    assert report.kinds() == (set() if meets else {"after end"}), str(report)
    if not meets:
        assert "shared memory of device 0 block" in str(report.findings[0])
        assert 'out_ref[me] = plgpu.cluster_ref(smem, {"c": 1 - me})[...]' in str(report)


@pytest.mark.parametrize("waits", [True, False])
def test_an_arrival_at_a_block_that_has_ended(waits):
    """At a cluster's barrier an arrival reaches all blocks, whose memory must still be there."""

    def body(out_ref, met):
        plgpu.barrier_arrive(met)
        if waits:
            plgpu.barrier_wait(met)
        out_ref[lax.axis_index("c")] = jnp.ones((128,), jnp.float32)

    found = set()
    for seed in range(8):
        with simulate(seed=seed, on_finding="record") as report:
            kernel = plgpu.kernel(
                body,
                out_type=jax.ShapeDtypeStruct((2, 128), jnp.float32),
                scratch_types=[plgpu.ClusterBarrier(collective_axes=("c",))],
                cluster=(2,),
                cluster_names=("c",),
            )
            jax.block_until_ready(kernel())
        found |= report.kinds()
    assert ("ended block" in found) != waits, found
