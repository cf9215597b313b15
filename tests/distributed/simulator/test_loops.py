"""Loops: their conditions may look at memory and at semaphores, and wait in vain."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from stretto.distributed.simulator import DeadlockError, StepLimitError, simulate

SEMAPHORE = plgpu.SemaphoreType.REGULAR
SCHEDULES = ["random", "pct", "round_robin"]
X = np.arange(128, dtype=np.float32)


def run(body, scratch=(), *, threads=1, **settings):
    names = {"num_threads": threads, "thread_name": "wg"} if threads > 1 else {}
    with simulate(max_steps=5000, **settings) as report:
        kernel = plgpu.kernel(
            body, out_type=jax.ShapeDtypeStruct(X.shape, X.dtype), scratch_types=scratch, **names
        )
        out = np.asarray(kernel(X))
    return out, report


def until_signalled(sem, count=1):
    lax.while_loop(lambda _: pl.semaphore_read(sem) < count, lambda c: c, 0)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("seed", range(3))
def test_condition_reads_a_semaphore(schedule, seed):
    """What the signaller did before is there, as `ld.acquire` says."""

    def body(x_ref, inbox_ref, out_ref, sem):
        device = lax.axis_index("x")
        peer = {"x": 1 - device}
        plgpu.remote_ref(inbox_ref, peer)[...] = x_ref[...] + 0
        pl.semaphore_signal(sem, device_id=peer)
        until_signalled(sem)
        out_ref[...] = inbox_ref[...] + device.astype(jnp.float32)
        pl.semaphore_wait(sem)

    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    kernel = plgpu.kernel(
        body, out_type=[jax.ShapeDtypeStruct((128,), np.float32)] * 2, scratch_types=[SEMAPHORE]
    )
    fn = jax.shard_map(kernel, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    with simulate(schedule=schedule, seed=seed) as report:
        out = np.asarray(jax.jit(fn)(np.arange(256, dtype=np.float32))[1])
    assert report.ok, str(report)
    np.testing.assert_array_equal(out, np.r_[X + 128, X + 1])


def test_condition_reads_shared_memory():
    def body(x_ref, out_ref, count):
        count[0] = 0

        def increase(passes):
            count[0] += 1
            return passes + 1

        passes = lax.while_loop(lambda _: count[0] < 3, increase, 0)
        out_ref[...] = x_ref[...] + passes

    out, report = run(body, [plgpu.SMEM((1,), jnp.int32)])
    assert report.ok, str(report)
    np.testing.assert_array_equal(out, X + 3)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_condition_looks_at_what_another_warpgroup_writes(schedule):
    """It ends, and it is a race: nothing orders the two."""

    def body(x_ref, out_ref, flag, ready):
        @pl.when(lax.axis_index("wg") == 0)
        def _():
            flag[0] = 0
            plgpu.barrier_arrive(ready)
            lax.while_loop(lambda _: flag[0] < 1, lambda c: c, 0)
            out_ref[...] = x_ref[...] + 1

        @pl.when(lax.axis_index("wg") == 1)
        def _():
            plgpu.barrier_wait(ready)
            flag[0] = 1

    scratch = [plgpu.SMEM((1,), jnp.int32), plgpu.Barrier()]
    settings = {"schedule": schedule, "on_finding": "record"}
    out, report = run(body, scratch, threads=2, **settings)
    assert report.kinds() == {"race"}, str(report)
    np.testing.assert_array_equal(out, X + 1)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_looking_in_vain_is_a_deadlock(schedule):
    """At once, though each could look for ever; and the report has the loop's line."""

    def body(x_ref, out_ref, sems):
        me = lax.axis_index("wg")
        until_signalled(sems.at[me])
        pl.semaphore_signal(sems.at[1 - me])
        out_ref[...] = x_ref[...]

    with pytest.raises(DeadlockError, match="nothing has changed since") as error:
        run(body, [SEMAPHORE((2,))], threads=2, schedule=schedule)
    assert "lax.while_loop(lambda _: pl.semaphore_read(sem) < count" in str(error.value)
    assert error.value.report.statistics.steps < 200


@pytest.mark.parametrize("arrives", [True, False])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_looking_at_a_barrier(schedule, arrives):
    def body(x_ref, out_ref, first, second):
        @pl.when(lax.axis_index("wg") == 0)
        def _():
            # The first look that succeeds changes nothing but the barrier's phase.
            def look(_):
                plgpu.barrier_test(first)
                return plgpu.barrier_test(second)

            lax.while_loop(lambda seen: ~seen, look, False)
            out_ref[...] = x_ref[...]

        @pl.when(lax.axis_index("wg") == 1)
        def _():
            plgpu.barrier_arrive(first)
            if arrives:
                plgpu.barrier_arrive(second)

    scratch = [plgpu.Barrier(), plgpu.Barrier()]
    if arrives:
        out, report = run(body, scratch, threads=2, schedule=schedule)
        assert report.ok, str(report)
        np.testing.assert_array_equal(out, X)
    else:
        with pytest.raises(DeadlockError, match="nothing has changed since"):
            run(body, scratch, threads=2, schedule=schedule)


def test_looking_that_carries_a_limit_ends_by_itself():
    """A pass that changes what the loop carries is not in vain."""

    def body(x_ref, out_ref, sem):
        passes = lax.while_loop(
            lambda n: (pl.semaphore_read(sem) < 1) & (n < 300), lambda n: n + 1, jnp.int32(0)
        )
        out_ref[...] = x_ref[...] + passes.astype(jnp.float32)

    out, report = run(body, [SEMAPHORE])
    assert report.ok, str(report)
    np.testing.assert_array_equal(out, X + 300)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_one_who_looks_sees_what_was_done_just_before_another_looks(schedule):
    """Each signals and then looks, without a step between: neither may miss the other's signal."""

    def body(x_ref, out_ref, sems):
        me = lax.axis_index("wg")
        for step in range(1, 4):
            pl.semaphore_signal(sems.at[1 - me])
            until_signalled(sems.at[me], step)
        pl.semaphore_wait(sems.at[me], 3)
        out_ref[pl.ds(64 * me, 64)] = x_ref[pl.ds(64 * me, 64)]

    for seed in range(5):
        out, report = run(body, [SEMAPHORE((2,))], threads=2, schedule=schedule, seed=seed)
        assert report.ok, str(report)
        np.testing.assert_array_equal(out, X)


def test_loop_that_acts_lets_others_run():
    """Shared memory is written without a step, and still the other warpgroup gets its turn."""

    def body(x_ref, out_ref, count, sem):
        @pl.when(lax.axis_index("wg") == 0)
        def _():
            def look(_):
                count[0] += 1
                return pl.semaphore_read(sem)

            count[0] = 0
            lax.while_loop(lambda seen: seen < 1, look, jnp.int32(0))
            out_ref[...] = x_ref[...]
            pl.semaphore_wait(sem)

        @pl.when(lax.axis_index("wg") == 1)
        def _():
            pl.semaphore_signal(sem)

    out, report = run(body, [plgpu.SMEM((1,), jnp.int32), SEMAPHORE], threads=2)
    assert report.ok, str(report)
    np.testing.assert_array_equal(out, X)


@pytest.mark.parametrize("reads", [False, True])
def test_endless_loop_is_given_up(reads):
    def body(x_ref, out_ref, count):
        count[0] = 0

        def go_on(n):
            if reads:
                count[0] += 1
            return n ^ 1

        n = lax.while_loop(lambda n: n < 2, go_on, 0)
        out_ref[...] = x_ref[...] + n

    with pytest.raises(StepLimitError, match="max_steps"):
        run(body, [plgpu.SMEM((1,), jnp.int32)])
