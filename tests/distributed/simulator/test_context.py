"""`simulate` and JAX: caches, errors, divergence, several kernels in one program."""

from __future__ import annotations

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from stretto.distributed.simulator import (
    DeadlockError,
    FindingError,
    RendezvousError,
    SimulatorParams,
    StepLimitError,
    UnsupportedKernelError,
    is_simulating,
    simulate,
)
from stretto.distributed.simulator.reports.statistics import Statistics

SEMAPHORE = plgpu.SemaphoreType.REGULAR
X = np.arange(128, dtype=np.float32)


def on_devices(fn, count=2):
    mesh = Mesh(np.array(jax.devices()[:count]), ("x",), axis_types=(AxisType.Auto,))
    return jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False))


def like(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def add_one(x, **kernel):
    def body(x_ref, out_ref):
        out_ref[...] = x_ref[...] + 1

    return plgpu.kernel(body, out_type=like(x), **kernel)(x)


def shift(x, **kernel):
    """Puts the shard to the next device."""

    def body(x_ref, out_ref, received_sem):
        to = {"x": lax.rem(lax.axis_index("x") + 1, lax.axis_size("x"))}
        plgpu.remote_ref(out_ref, to)[...] = x_ref[...] + 0
        pl.semaphore_signal(received_sem, device_id=to)
        pl.semaphore_wait(received_sem)

    return plgpu.kernel(body, out_type=like(x), scratch_types=[SEMAPHORE], **kernel)(x)


def hang(x):
    def body(x_ref, out_ref, never_sem):
        pl.semaphore_wait(never_sem)
        out_ref[...] = x_ref[...]

    return plgpu.kernel(body, out_type=like(x), scratch_types=[SEMAPHORE])(x)


def race(x):
    def body(x_ref, out_ref):
        out_ref[...] = x_ref[...]

    return plgpu.kernel(body, out_type=like(x), num_threads=2, thread_name="wg")(x)


def test_caches_do_not_leak():
    traces = []

    def fn(x):
        traces.append(is_simulating())
        return add_one(x)

    jitted = jax.jit(fn)
    for seed in range(3):
        with simulate(seed=seed) as report:
            np.testing.assert_array_equal(jitted(X), X + 1)
        assert report.launches == 1
    with pytest.raises(ValueError, match=r"kernel body needs GPUs; .*`stretto simulate SCRIPT`"):
        jitted(X)  # Outside there is nothing to run the kernel on a CPU.
    with simulate() as report:
        jitted(X)
    assert report.launches == 1
    assert traces == [True, False]  # A seed needs no new trace.


def test_eager_and_vmapped_calls():
    with simulate() as report:
        np.testing.assert_array_equal(add_one(X), X + 1)
        batch = np.stack([X, 2 * X])
        np.testing.assert_array_equal(jax.vmap(add_one)(batch), batch + 1)
    assert report.launches == 2


def test_one_kernel_without_the_context():
    out = jax.jit(lambda x: add_one(x, interpret=SimulatorParams()))(X)
    np.testing.assert_array_equal(out, X + 1)
    x = np.arange(4 * 128, dtype=np.float32)
    jitted = on_devices(lambda x: shift(x, interpret=SimulatorParams()), 4)
    for _ in range(3):
        np.testing.assert_array_equal(jitted(x), np.roll(x, 128))


def test_launches_of_a_simulation_inside_are_known_outside():
    with simulate() as outer:
        add_one(X)
        with simulate() as inner:
            add_one(add_one(X))
    assert (outer.launches, outer.nested_launches) == (1, 2)
    assert (inner.launches, inner.nested_launches) == (2, 0)


def test_core_count_is_there_inside_only():
    before = getattr(jax.devices()[0], "core_count", None)
    with simulate(core_count=7):
        assert jax.devices()[0].core_count == 7
    assert getattr(jax.devices()[0], "core_count", None) == before


@pytest.mark.parametrize("count", [1, 2, 8])
def test_errors_leave_the_context_and_the_next_run_works(count):
    x = np.tile(X, count)
    for kernel, error in ((hang, DeadlockError), (race, FindingError)):
        with pytest.raises(error) as caught, simulate() as report:
            jax.block_until_ready(on_devices(kernel, count)(x))
        assert caught.value.report is report
        with simulate() as report:
            out = on_devices(shift, count)(x)
        assert report.ok
        np.testing.assert_array_equal(out, x)


def test_error_is_seen_by_every_device():
    x = np.tile(X, 4)
    with pytest.raises(DeadlockError), simulate():
        shards = [s.data for s in on_devices(hang, 4)(x).addressable_shards]
        for shard in shards:
            with pytest.raises(Exception, match=r"never_sem >= 1, which is 0"):
                shard.block_until_ready()


def test_error_that_nobody_looked_at_is_raised_at_the_end():
    with pytest.raises(DeadlockError), simulate():
        on_devices(hang)(np.tile(X, 2))


def test_deadlock_says_who_waits_where():
    with pytest.raises(DeadlockError) as caught, simulate():
        on_devices(hang)(np.tile(X, 2))
    text = str(caught.value)
    assert "device 0 block 0" in text and "device 1 block 0" in text
    assert "never_sem" in text and "which is 0" in text
    assert "pl.semaphore_wait(never_sem)" in text
    assert "no signal of it is in the kernel" in text


def test_divergence_names_who_is_missing():
    def fn(x):
        return lax.cond(lax.axis_index("x") == 1, lambda x: x, shift, x)

    with (
        pytest.raises(RendezvousError, match="device 1 did not come"),
        simulate(rendezvous_timeout=1.0),
    ):
        jax.block_until_ready(on_devices(fn)(np.tile(X, 2)))
    with simulate():
        np.testing.assert_array_equal(on_devices(shift)(np.tile(X, 2)), np.tile(X, 2))


def test_independent_calls_of_one_kernel():
    def fn(x):
        return shift(x) + 10 * shift(x * 2) + 100 * shift(shift(x))

    x = np.arange(8 * 128, dtype=np.float32)
    shifted = np.roll(x, 128)
    want = shifted + 20 * shifted + 100 * np.roll(shifted, 128)
    jitted = on_devices(fn, 8)
    with simulate() as report:
        for _ in range(10):
            np.testing.assert_array_equal(jitted(x), want)
    assert report.launches == 40


def test_loop_around_a_kernel():
    def fn(x):
        return lax.fori_loop(0, 3, lambda _, x: shift(x), x)

    x = np.arange(4 * 128, dtype=np.float32)
    with simulate() as report:
        np.testing.assert_array_equal(on_devices(fn, 4)(x), np.roll(x, 3 * 128))
    assert report.launches == 3


def test_kernel_that_changes_a_ref():
    def body(x_ref, out_ref):
        out_ref[...] = x_ref[...]
        x_ref[...] = x_ref[...] + 1

    def fn(x):
        ref = jax.new_ref(x)
        out = plgpu.kernel(body, out_type=like(x))(ref)
        return out, ref[...]

    with simulate() as report:
        out, changed = jax.jit(fn)(X)
    assert report.ok, str(report)
    np.testing.assert_array_equal(out, X)
    np.testing.assert_array_equal(changed, X + 1)


def test_debug_print_is_in_the_report(capfd):
    def body(x_ref, out_ref):
        out_ref[...] = x_ref[...]
        pl.debug_print("block {}", lax.axis_index("b"))

    with simulate(on_finding="record") as report:
        plgpu.kernel(body, out_type=like(X), grid=(2,), grid_names=("b",))(X)
    assert sorted(report.output) == ["block 0", "block 1"]


def test_unknown_primitive_is_named_with_its_line():
    def body(x_ref, out_ref):
        @plgpu.inline_mgpu()
        def device_code(ctx):
            pass

        device_code()
        out_ref[...] = x_ref[...]

    with pytest.raises(UnsupportedKernelError, match=r"inline_mgpu.*test_context.py"), simulate():
        plgpu.kernel(body, out_type=like(X))(X)


def test_devices_of_other_processes_are_refused(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "local_device_count", lambda: 1)
    message = "on 2 devices, of which this process has 1"
    with pytest.raises(UnsupportedKernelError, match=message), simulate():
        on_devices(shift)(np.tile(X, 2))


def test_step_limit():
    def body(x_ref, out_ref, sem):
        looks = lax.while_loop(lambda _: pl.semaphore_read(sem) == 0, lambda n: n + 1, jnp.int32(0))
        out_ref[...] = x_ref[...] + looks.astype(jnp.float32)

    with pytest.raises(StepLimitError, match="max_steps=1000"), simulate(max_steps=1000):
        jax.block_until_ready(plgpu.kernel(body, out_type=like(X), scratch_types=[SEMAPHORE])(X))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"schedule": "fifo"}, "schedule='fifo' is not one of"),
        ({"on_finding": "ignore"}, "on_finding='ignore'"),
        ({"resident_blocks": 0}, "resident_blocks=0 must be at least 1"),
        ({"core_count": 0}, "core_count=0 must be at least 1"),
        ({"max_steps": 0}, "max_steps=0 must be at least 1"),
        ({"seed": "a"}, "seed='a' is of type str; it must be an integer"),
        ({"core_count": 2.0}, "core_count=2.0 is of type float"),
        ({"rendezvous_timeout": float("nan")}, "rendezvous_timeout=nan must be a number of sec"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message), simulate(**settings):
        pass


MANY = """
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 33)
import importlib.util, numpy as np
spec = importlib.util.spec_from_file_location("context", {path!r})
context = importlib.util.module_from_spec(spec)
spec.loader.exec_module(context)
x = np.arange(33 * 128, dtype=np.float32)
fn = context.on_devices(lambda x: context.shift(context.shift(x)), 33)
with context.simulate() as report:
    for _ in range(3):
        np.testing.assert_array_equal(fn(x), np.roll(x, 256))
print("launches", report.launches)
"""


def test_more_devices_than_cores():
    source = MANY.format(path=__file__)
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=120, check=False
    )
    assert "launches 6" in done.stdout, done.stderr


def test_the_bytes_of_copies_are_told_as_a_sum():
    assert "2 copies, 64 bytes in all, " in str(Statistics(copies=2, copy_bytes=64))
