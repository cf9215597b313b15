"""Several devices: how they are named, scopes of atomics and signals, multicast, residency."""

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

from stretto.distributed.simulator import DeadlockError, KernelFaultError, simulate

SEMAPHORE = plgpu.SemaphoreType.REGULAR
COLUMNS = 128


def launch(body, scratch=(), *, shape=(2, 4), rows=1, dtype=np.float32, outs=None, **settings):
    """Runs `body` on a mesh of axes "x" and "y", whose operand says on which device it is."""
    count = int(np.prod(shape))
    mesh = Mesh(np.array(jax.devices()[:count]).reshape(shape), ("x", "y"))
    out_type = [jax.ShapeDtypeStruct(s, dtype) for s in (outs or [(rows, COLUMNS)])]
    threads = {k: settings.pop(k) for k in ("num_threads", "thread_name") if k in settings}
    grid = settings.pop("grid", (1,))
    params = plgpu.CompilerParams(skip_device_barrier=settings.pop("skip_device_barrier", False))

    def fn(x):
        kernel = plgpu.kernel(
            body,
            out_type=out_type,
            scratch_types=scratch,
            grid=grid,
            grid_names=("b",),
            compiler_params=params,
            **threads,
        )
        return kernel(x)

    spec = P(("x", "y"))
    mapped = jax.shard_map(fn, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    x = np.repeat(np.arange(count), rows)[:, None] + np.zeros((1, COLUMNS))
    with simulate(on_finding="record", **settings) as report:
        out = jax.block_until_ready(jax.jit(mapped)(x.astype(dtype)))
    return [np.asarray(o) for o in out], report


def put_to(device_id):
    """A kernel that puts its row to the device that `device_id()` names, and waits for its own."""

    def body(x_ref, out_ref, received_sem):
        to = device_id()
        plgpu.remote_ref(out_ref, to)[...] = x_ref[...] + 0
        pl.semaphore_signal(received_sem, device_id=to)
        pl.semaphore_wait(received_sem)

    (out,), report = launch(body, [SEMAPHORE])
    assert report.ok, str(report)
    return out[:, 0].astype(int).tolist(), report


def next_on(axis):
    return lax.rem(lax.axis_index(axis) + 1, lax.axis_size(axis))


def test_axis_of_a_larger_mesh():
    """Two rings of four at once, which have nothing to do with each other."""
    order, report = put_to(lambda: {"y": next_on("y")})
    assert order == [3, 0, 1, 2, 7, 4, 5, 6]
    assert set(report.statistics.link_bytes) == {
        (4 * x + y, 4 * x + (y + 1) % 4) for x in range(2) for y in range(4)
    }


def test_other_axis():
    assert put_to(lambda: {"x": next_on("x")})[0] == [4, 5, 6, 7, 0, 1, 2, 3]


def test_joint_axes():
    def following():
        return {("x", "y"): lax.rem(lax.axis_index("x") * 4 + lax.axis_index("y") + 1, 8)}

    assert put_to(following)[0] == [7, 0, 1, 2, 3, 4, 5, 6]


def test_coordinates():
    assert put_to(lambda: (next_on("x"), lax.axis_index("y")))[0] == [4, 5, 6, 7, 0, 1, 2, 3]


def test_device_outside_the_mesh():
    def body(x_ref, out_ref):
        plgpu.remote_ref(out_ref, (jnp.int32(2), jnp.int32(0)))[...] = x_ref[...]

    with pytest.raises(KernelFaultError, match="device id 8 is not in the mesh of 8 devices"):
        launch(body)


@pytest.mark.parametrize("remote", [False, True])
def test_atomics_have_the_scope_of_a_device(remote):
    """Devices may not add to one place at once, with the scope that JAX gives them."""

    def body(x_ref, out_ref, sum_ref, closing_sem):
        home = {"x": lax.axis_index("x"), "y": 0} if remote else {}
        target = plgpu.remote_ref(sum_ref, home) if remote else sum_ref
        started_sem = pl.get_global(SEMAPHORE)
        sum_ref[...] = jnp.zeros((1, COLUMNS), jnp.float32)
        for y in range(2):
            pl.semaphore_signal(started_sem, device_id={"y": y})
        pl.semaphore_wait(started_sem, 2)
        plgpu.atomic_add(target, x_ref[...] + 1)
        for y in range(2):
            pl.semaphore_signal(closing_sem, device_id={"y": y})
        pl.semaphore_wait(closing_sem, 2)
        out_ref[...] = x_ref[...]

    (_, total), report = launch(body, [SEMAPHORE], shape=(1, 2), outs=[(1, COLUMNS)] * 2)
    if remote:
        assert total[0, 0] == 3  # 1 + 2: right here, and a matter of luck on a device.
        assert report.kinds() == {"race"}
        assert "atomic update" in str(report.findings[0])
    else:
        assert report.ok, str(report)
        assert total[:, 0].tolist() == [1, 2]


def test_blocks_add_atomically():
    def body(x_ref, out_ref):
        done_sem = pl.get_global(SEMAPHORE)
        is_first = lax.axis_index("b") == 0

        @pl.when(is_first)
        def _():
            out_ref[...] = jnp.zeros_like(out_ref)
            pl.semaphore_signal(done_sem, 10)

        pl.semaphore_wait(done_sem, 10, decrement=False)
        plgpu.atomic_add(out_ref, x_ref[...] + 1)

    (out,), report = launch(body, shape=(1, 2), grid=(5,))
    assert report.ok, str(report)
    assert out[:, 0].tolist() == [5, 10]


@pytest.mark.parametrize(
    ("op", "dtype"), [("add", "float32"), ("min", "float16"), ("max", "bfloat16")]
)
def test_reducing_copies(op, dtype):
    def body(x_ref, out_ref, smem, landed, ready_sem, done_sem):
        out_ref[...] = jnp.full((1, COLUMNS), {"add": 0, "min": 9, "max": -9}[op], dtype)
        peers = [{"y": y} for y in range(3)]
        for peer in peers:
            pl.semaphore_signal(ready_sem, device_id=peer)
        pl.semaphore_wait(ready_sem, 3)
        plgpu.copy_gmem_to_smem(x_ref, smem, landed)
        plgpu.barrier_wait(landed)
        for peer in peers:
            plgpu.copy_smem_to_gmem(smem, plgpu.remote_ref(out_ref, peer), reduction_op=op)
        plgpu.wait_smem_to_gmem(0)
        for peer in peers:
            pl.semaphore_signal(done_sem, device_id=peer)
        pl.semaphore_wait(done_sem, 3)

    scratch = [plgpu.SMEM((1, COLUMNS), dtype), plgpu.Barrier(), SEMAPHORE, SEMAPHORE]
    (out,), report = launch(body, scratch, shape=(1, 3), dtype=jnp.dtype(dtype))
    assert report.ok, str(report)
    assert out[:, 0].tolist() == [{"add": 3, "min": 0, "max": 2}[op]] * 3


@pytest.mark.parametrize("scope", ["sys", "gpu"])
def test_scope_of_a_wait(scope):
    """A wait in device scope does not see what another device released."""

    def body(x_ref, out_ref, inbox_ref, received_sem):
        peer = {"y": 1 - lax.axis_index("y")}
        plgpu.remote_ref(inbox_ref, peer)[...] = x_ref[...] + 0
        plgpu.semaphore_signal(received_sem, device_id=peer)
        plgpu.semaphore_wait(received_sem, memory_scope=scope)
        out_ref[...] = inbox_ref[...] + 0

    _, report = launch(body, [SEMAPHORE], shape=(1, 2), outs=[(1, COLUMNS)] * 2)
    assert ("race" in report.kinds()) == (scope == "gpu"), str(report)


def test_parallel_signals_release_nothing_with_the_first():
    """JAX (0.11.2) sends the first of them before its fence."""

    def run(position):
        def body(x_ref, out_ref, inbox_ref, decoy_sem, received_sem):
            peer = {"y": 1 - lax.axis_index("y")}
            plgpu.remote_ref(inbox_ref, peer)[...] = x_ref[...] + 0
            sems = [decoy_sem, decoy_sem]
            sems[position] = received_sem
            plgpu.semaphore_signal_parallel(
                *(plgpu.SemaphoreSignal(s, device_id=peer) for s in sems)
            )
            pl.semaphore_wait(received_sem)
            out_ref[...] = inbox_ref[...] + 0
            pl.semaphore_wait(decoy_sem)

        return launch(body, [SEMAPHORE] * 2, shape=(1, 2), outs=[(1, COLUMNS)] * 2)[1]

    assert "race" in run(0).kinds()
    assert run(1).ok, str(run(1))


def test_signals_through_the_switch():
    def body(x_ref, out_ref, done_sem):
        plgpu.multimem_store(x_ref[...], out_ref.at[pl.ds(lax.axis_index("y"), 1)], ("x", "y"))
        plgpu.semaphore_signal_multicast(done_sem, collective_axes=("x", "y"))
        pl.semaphore_wait(done_sem, 4)

    (out,), report = launch(body, [SEMAPHORE], shape=(1, 4), outs=[(4, COLUMNS)])
    assert report.ok, str(report)
    assert out[:, 0].reshape(4, 4).tolist() == [[0, 1, 2, 3]] * 4


@pytest.mark.parametrize("resident", [3, 4])
def test_blocks_that_wait_must_be_resident(resident):
    def body(x_ref, out_ref):
        arrived_sem = pl.get_global(SEMAPHORE)
        pl.semaphore_signal(arrived_sem)
        pl.semaphore_wait(arrived_sem, 4, decrement=False)

        @pl.when(lax.axis_index("b") == 0)
        def _():
            out_ref[...] = x_ref[...]

    if resident == 4:
        assert launch(body, shape=(1, 2), grid=(4,), resident_blocks=4)[1].ok
        return
    with pytest.raises(DeadlockError) as caught:
        launch(body, shape=(1, 2), grid=(4,), resident_blocks=resident)
    text = str(caught.value)
    assert "1 of 4 blocks have not started: only resident_blocks=3" in text
    assert "arrived_sem >= 4, which is 3" in text
    assert "pl.semaphore_signal(arrived_sem)" in text


def test_blocks_that_do_not_wait_may_be_many():
    def body(x_ref, out_ref):
        out_ref[lax.axis_index("b")] = x_ref[0]

    (out,), report = launch(body, shape=(1, 1), outs=[(40, COLUMNS)], grid=(40,), resident_blocks=3)
    assert report.ok and out.shape == (40, COLUMNS)


def test_without_the_barrier_before_it_a_kernel_may_touch_nobody():
    def body(x_ref, out_ref, received_sem):
        peer = {"y": 1 - lax.axis_index("y")}
        plgpu.remote_ref(out_ref, peer)[...] = x_ref[...] + 0
        pl.semaphore_signal(received_sem, device_id=peer)
        pl.semaphore_wait(received_sem)

    for skips in (False, True):
        _, report = launch(body, [SEMAPHORE], shape=(1, 2), skip_device_barrier=skips)
        assert report.kinds() == ({"before start"} if skips else set())
