"""Protocols with one bug each, which every seed must catch, and their correct twins.

Each kernel takes the name of a bug; with None it is the correct twin. The payload says who sent it.
A kernel is a function of the settings of a simulation, and is traced once.
"""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from stretto.distributed.simulator import DeadlockError, simulate

ROWS, COLUMNS, DEVICES = 8, 128, 3
SEMAPHORE = plgpu.SemaphoreType.REGULAR


def payload(device, step=0):
    return 1000 * step + 100 * device + np.arange(ROWS, dtype=np.float32)[:, None]


def neighbours(count):
    device = lax.axis_index("x")
    return {"x": lax.rem(device + 1, count)}, {"x": lax.rem(device + count - 1, count)}


def launch(body, scratch, *, outs, want, blocks=1, warpgroups=None, devices=DEVICES, **always):
    """A function of settings that runs `body`: the last result, what it should be, the report."""
    threads = dict(num_threads=warpgroups, thread_name="wg") if warpgroups else {}

    def fn(x):
        return plgpu.kernel(
            body,
            out_type=[jax.ShapeDtypeStruct(s, jnp.float32) for s in outs],
            scratch_types=scratch,
            grid=(blocks,),
            grid_names=("block",),
            **threads,
        )(x)

    mesh = Mesh(np.array(jax.devices()[:devices]), ("x",), axis_types=(AxisType.Auto,))
    mapped = jax.shard_map(fn, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    x = np.concatenate([np.broadcast_to(payload(d), (ROWS, COLUMNS)) for d in range(devices)])
    program = jax.jit(mapped)

    def run(**settings):
        with simulate(on_finding="record", **always, **settings) as report:
            *_, out = jax.block_until_ready(program(x))
        return out, want, report

    return run


@functools.cache
def ring_put(bug=None):
    """Each device puts its rows into its successor's buffer by a bulk copy, and signals it."""

    def body(x_ref, inbox_ref, out_ref, smem, landed, received_sem):
        successor, _ = neighbours(DEVICES)
        plgpu.copy_gmem_to_smem(x_ref, smem, landed)
        plgpu.barrier_wait(landed)
        if bug == "signal before data":
            pl.semaphore_signal(received_sem, device_id=successor)
        plgpu.copy_smem_to_gmem(smem, plgpu.remote_ref(inbox_ref, successor))
        if bug != "no wait for the store":
            plgpu.wait_smem_to_gmem(0)
        if bug not in ("dropped signal", "signal before data"):
            pl.semaphore_signal(received_sem, device_id=successor)
        if bug != "dropped wait":
            pl.semaphore_wait(received_sem)
        out_ref[...] = inbox_ref[...] + 0.5
        plgpu.wait_smem_to_gmem(0)

    scratch = [plgpu.SMEM((ROWS, COLUMNS), jnp.float32), plgpu.Barrier(), SEMAPHORE]
    want = [payload((d - 1) % DEVICES) + np.zeros((1, COLUMNS)) + 0.5 for d in range(DEVICES)]
    return launch(body, scratch, outs=[(ROWS, COLUMNS)] * 2, want=np.concatenate(want))


@functools.cache
def pull(bug=None):
    """Each device fetches its successor's rows, and tells it that it is done with them."""

    def body(x_ref, out_ref, smem, landed, released_sem):
        successor, _ = neighbours(DEVICES)
        plgpu.copy_gmem_to_smem(plgpu.remote_ref(x_ref, successor), smem, landed)
        plgpu.barrier_wait(landed)
        plgpu.copy_smem_to_gmem(smem, out_ref)
        if bug != "un-awaited copy":
            plgpu.wait_smem_to_gmem(0)
        if bug != "no closing barrier":
            pl.semaphore_signal(released_sem, device_id=successor)
            pl.semaphore_wait(released_sem)

    scratch = [plgpu.SMEM((ROWS, COLUMNS), jnp.float32), plgpu.Barrier(), SEMAPHORE]
    want = [payload((d + 1) % DEVICES) + np.zeros((1, COLUMNS)) for d in range(DEVICES)]
    return launch(body, scratch, outs=[(ROWS, COLUMNS)], want=np.concatenate(want))


@functools.cache
def exchange(bug=None, steps=4):
    """Two devices swap a row each step. A slot is free again once the next row has come."""
    slots = 1 if bug == "one slot" else 2

    def body(x_ref, inbox_ref, out_ref, received_sem):
        peer, _ = neighbours(2)
        for step in range(steps):
            there = plgpu.remote_ref(inbox_ref, peer)
            there[step % slots] = x_ref[0] + 1000.0 * step
            pl.semaphore_signal(received_sem, device_id=peer)
            pl.semaphore_wait(received_sem)
            out_ref[step] = inbox_ref[step % slots]

    rows = [payload(1 - d, step)[0] for d in range(2) for step in range(steps)]
    return launch(
        body,
        [SEMAPHORE],
        outs=[(2, COLUMNS), (steps, COLUMNS)],
        devices=2,
        want=np.stack(rows) + np.zeros((1, COLUMNS)),
    )


@functools.cache
def batches(bug=None, count=3):
    """A consumer takes back what it has waited for, while the producer signals on."""

    def body(x_ref, out_ref, received_sem, consumed_sem, zero_sem):
        successor, predecessor = neighbours(DEVICES)
        for _ in range(count):
            pl.semaphore_signal(received_sem, device_id=successor)
            if bug == "reset by a plain store":
                pl.semaphore_wait(received_sem, decrement=False)
                received_sem[...] = zero_sem[...]
            else:
                pl.semaphore_wait(received_sem)
        out_ref[...] = x_ref[...]
        pl.semaphore_signal(consumed_sem, device_id=predecessor)
        pl.semaphore_wait(consumed_sem)

    want = [payload(d) + np.zeros((1, COLUMNS)) for d in range(DEVICES)]
    return launch(body, [SEMAPHORE] * 3, outs=[(ROWS, COLUMNS)], want=np.concatenate(want))


@functools.cache
def two_warpgroups(bug=None):
    """Warpgroup 0 writes to the successor and reads what came; warpgroup 1 signals and waits."""

    def body(x_ref, inbox_ref, out_ref, written, arrived, received_sem):
        successor, _ = neighbours(DEVICES)
        wg = lax.axis_index("wg")

        @pl.when(wg == 0)
        def _():
            plgpu.remote_ref(inbox_ref, successor)[...] = x_ref[...] + 0.0
            plgpu.barrier_arrive(written)

        @pl.when(wg == 1)
        def _():
            if bug != "signal from another warpgroup":
                plgpu.barrier_wait(written)
            pl.semaphore_signal(received_sem, device_id=successor)
            pl.semaphore_wait(received_sem)
            plgpu.barrier_arrive(arrived)

        @pl.when(wg == 0)
        def _():
            if bug != "wait in another warpgroup":
                plgpu.barrier_wait(arrived)
            out_ref[...] = inbox_ref[...] + 0.0

    scratch = [plgpu.Barrier(), plgpu.Barrier(), SEMAPHORE]
    want = [payload((d - 1) % DEVICES) + np.zeros((1, COLUMNS)) for d in range(DEVICES)]
    return launch(
        body, scratch, outs=[(ROWS, COLUMNS)] * 2, warpgroups=2, want=np.concatenate(want)
    )


@functools.cache
def grid_barrier(bug=None, blocks=132):
    """All blocks of a device wait for each other."""

    def body(x_ref, out_ref):
        arrived_sem = pl.get_global(SEMAPHORE)
        pl.semaphore_signal(arrived_sem)
        pl.semaphore_wait(arrived_sem, blocks, decrement=False)

        @pl.when(lax.axis_index("block") == 0)
        def _():
            out_ref[...] = x_ref[...]

    resident = 78 if bug == "132 blocks on 78" else 132
    want = [payload(d) + np.zeros((1, COLUMNS)) for d in range(2)]
    return launch(
        body,
        [],
        outs=[(ROWS, COLUMNS)],
        blocks=blocks,
        devices=2,
        resident_blocks=resident,
        want=np.concatenate(want),
    )


# The kernel, its bug, the kind of finding, and the lines that the finding must name.
BUGS = [
    (ring_put, "dropped signal", "deadlock", r"received_sem.* >= 1, which is 0"),
    (ring_put, "dropped wait", "race", r"copy_smem_to_gmem|inbox_ref\[\.\.\.\]"),
    (ring_put, "signal before data", "race", r"copy_smem_to_gmem|inbox_ref\[\.\.\.\]"),
    (ring_put, "no wait for the store", "race", r"copy_smem_to_gmem|inbox_ref\[\.\.\.\]"),
    (pull, "no closing barrier", "after end", r"copy_gmem_to_smem\(plgpu\.remote_ref"),
    (pull, "un-awaited copy", "unawaited copy", r"copy_smem_to_gmem\(smem, out_ref\)"),
    (exchange, "one slot", "race", r"there\[step % slots\]|out_ref\[step\] = "),
    (batches, "reset by a plain store", "race", r"received_sem\[\.\.\.\] = |semaphore_signal"),
    (
        two_warpgroups,
        "signal from another warpgroup",
        "race",
        r"remote_ref\(inbox_ref, succ|out_ref\[\.\.\.\] = ",
    ),
    (
        two_warpgroups,
        "wait in another warpgroup",
        "race",
        r"remote_ref\(inbox_ref, succ|out_ref\[\.\.\.\] = inbox",
    ),
    (grid_barrier, "132 blocks on 78", "deadlock", r"54 of 132 blocks have not started"),
]
KERNELS = [ring_put, pull, exchange, batches, two_warpgroups, grid_barrier]
SCHEDULES = ("random", "pct", "round_robin")


def run_bug(kernel, bug, seed):
    """The findings of a run with `bug`, as (kind, text)."""
    schedule = SCHEDULES[seed % 3]
    try:
        _, _, report = kernel(bug)(seed=seed, schedule=schedule)
    except DeadlockError as error:
        return [("deadlock", str(error))] + [(f.kind, str(f)) for f in error.report.findings]
    return [(f.kind, str(f)) for f in report.findings]


@pytest.mark.parametrize(("kernel", "bug", "kind", "pattern"), BUGS, ids=[b[1] for b in BUGS])
def test_bug_is_caught_in_every_seed(kernel, bug, kind, pattern):
    for seed in range(20):
        found = run_bug(kernel, bug, seed)
        named = [
            text
            for k, text in found
            if k == kind and all(re.search(line, text) for line in pattern.split("|"))
        ]
        assert named, (seed, found)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.__name__)
def test_correct_twin_is_clean(kernel):
    for seed in range(50):
        out, want, report = kernel()(seed=seed, schedule=SCHEDULES[seed % 3])
        assert report.ok, (seed, str(report))
        np.testing.assert_array_equal(out, want)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kernel", [ring_put, exchange], ids=lambda k: k.__name__)
def test_same_seed_same_run(kernel, schedule):
    bug = functools.partial(
        kernel("dropped wait" if kernel is ring_put else "one slot"), schedule=schedule
    )
    runs = [bug(seed=5) for _ in range(3)]
    for out, _, report in runs[1:]:
        assert str(report) == str(runs[0][2])
        np.testing.assert_array_equal(out, runs[0][0])
    if schedule == "random":
        others = [str(bug(seed=s)[2].statistics) for s in range(6, 12)]
        assert set(others) != {str(runs[0][2].statistics)}
