"""The schedules take turns over the seeds, so that twenty seeds find what one kind does not."""

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

from stretto.distributed.simulator import Report, simulate

SEMAPHORE = plgpu.SemaphoreType.REGULAR
ROWS, COLUMNS = 2, 128


def put(ref, device, value, sem, where=...):
    plgpu.remote_ref(ref, {"x": device})[where] = value
    pl.semaphore_signal(sem, device_id={"x": device})


def tree(bug):
    """A sum over four devices in two stages; the bug is one semaphore for both."""

    def body(x_ref, first_ref, second_ref, out_ref, first_sem, second_sem):
        device = lax.axis_index("x")
        put(first_ref, device ^ 1, x_ref[...] + 0, first_sem)
        pl.semaphore_wait(first_sem)
        pair = x_ref[...] + first_ref[...]
        sem = first_sem if bug else second_sem
        put(second_ref, device ^ 2, pair, sem)
        pl.semaphore_wait(sem)
        out_ref[...] = pair + second_ref[...]

    return body, [SEMAPHORE] * 2, lambda x: np.broadcast_to(x.sum(0), x.shape)


def ring(bug):
    """Everybody's rows, by both directions; the bug is one semaphore for the two."""

    def body(x_ref, after_ref, before_ref, out_ref, after_sem, before_sem):
        device, (steps, *_) = lax.axis_index("x"), after_ref.shape
        after, before = (lax.rem(device + by, steps + 1) for by in (1, steps))
        out_ref[...] = x_ref[...] + 0
        for step in range(steps):
            for ref, sem, to in ((after_ref, after_sem, after), (before_ref, before_sem, before)):
                rows = x_ref[...] if step == 0 else ref[step - 1]
                put(ref, to, rows + 0, after_sem if bug else sem, step)
            if bug:
                pl.semaphore_wait(after_sem, 2)
            else:
                pl.semaphore_wait(after_sem)
                pl.semaphore_wait(before_sem)
            out_ref[...] = out_ref[...] + after_ref[step] + before_ref[step]

    return body, [SEMAPHORE] * 2, lambda x: np.broadcast_to(2 * x.sum(0), x.shape) - x


def run(kernel, bug, seed, **settings) -> tuple[Report, bool]:
    """The report, and whether the numbers are right."""
    body, scratch, want = kernel(bug)
    devices, inbox = (4, (ROWS, COLUMNS)) if kernel is tree else (3, (2, ROWS, COLUMNS))
    outs = [jax.ShapeDtypeStruct(s, jnp.float32) for s in (inbox, inbox, (ROWS, COLUMNS))]

    def fn(x):
        return plgpu.kernel(body, out_type=outs, scratch_types=scratch)(x)[2]

    mesh = Mesh(np.array(jax.devices()[:devices]), ("x",))
    fn = jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False))
    x = np.arange(devices * ROWS * COLUMNS, dtype=np.float32).reshape(devices, ROWS, COLUMNS)
    with simulate(seed=seed, on_finding="record", **settings) as report:
        out = np.asarray(fn(x.reshape(-1, COLUMNS)))
    return report, np.array_equal(out.reshape(x.shape), want(x))


@pytest.mark.parametrize("kernel", [tree, ring], ids=lambda kernel: kernel.__name__)
def test_twenty_seeds_find_a_semaphore_that_serves_two(kernel):
    reports = [run(kernel, True, seed)[0] for seed in range(20)]
    found = [report for report in reports if not report.ok]
    assert len(found) >= 5, [report.title for report in found]
    assert "pct" in {report.schedule for report in found}
    first = found[0]
    assert "race" in first.kinds()
    assert str(first).startswith(f"simulation, seed {first.seed} ({first.schedule}): 1 kernel")


@pytest.mark.parametrize("kernel", [tree, ring], ids=lambda kernel: kernel.__name__)
def test_their_right_twins_are_clean(kernel):
    for seed in range(20):
        report, right = run(kernel, None, seed)
        assert report.ok and right, str(report)


def test_a_seed_has_its_schedule():
    reports = [run(tree, None, seed)[0] for seed in range(4)]
    assert [report.schedule for report in reports] == ["pct", "random"] * 2
    assert run(tree, None, 0, schedule="round_robin")[0].schedule == "round_robin"


@pytest.mark.parametrize("seed", [2, 3])
def test_a_seed_gives_the_same_run_again(seed):
    rotating, *again = (run(ring, True, seed)[0] for _ in range(3))
    named = run(ring, True, seed, schedule=rotating.schedule)[0]
    assert {str(report) for report in (*again, named)} == {str(rotating)}
