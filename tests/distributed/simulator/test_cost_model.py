"""Predicted times, statistics and traces of what a kernel does."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas.ops.gpu import hopper_matmul_mgpu
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from stretto.distributed.simulator import CostModel, simulate

ROWS, COLUMNS = 64, 256
RATES = CostModel(
    link_bandwidth=1e9,
    memory_bandwidth=1e12,
    link_latency=1e-6,
    memory_latency=0.0,
    signal_latency=0.5e-6,
    launch_latency=10e-6,
)


def ring_all_gather(count, cost_model=None, trace=False, launches=1):
    """Every shard goes once around the ring, in each launch; returns the report."""

    def body(x_ref, out_ref, smem, landed, received_sem):
        device = lax.axis_index("x")
        to = {"x": lax.rem(device + 1, count)}
        plgpu.copy_gmem_to_smem(x_ref, smem, landed)
        plgpu.barrier_wait(landed)
        plgpu.copy_smem_to_gmem(smem, out_ref.at[device])
        for step in range(count - 1):
            shard = lax.rem(device - step + count, count)
            plgpu.copy_smem_to_gmem(smem, plgpu.remote_ref(out_ref, to).at[shard])
            plgpu.wait_smem_to_gmem(0)
            pl.semaphore_signal(received_sem, device_id=to)
            pl.semaphore_wait(received_sem)
            coming = lax.rem(device - step - 1 + count, count)
            plgpu.copy_gmem_to_smem(out_ref.at[coming], smem, landed)
            plgpu.barrier_wait(landed)

    def fn(x):
        return plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct((count, ROWS, COLUMNS), jnp.float32),
            scratch_types=[
                plgpu.SMEM((ROWS, COLUMNS), jnp.float32),
                plgpu.Barrier(),
                plgpu.SemaphoreType.REGULAR,
            ],
        )(x)

    mesh = Mesh(np.array(jax.devices()[:count]), ("x",))
    mapped = jax.shard_map(fn, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    x = np.arange(count * ROWS * COLUMNS, dtype=np.float32).reshape(count * ROWS, COLUMNS)
    with simulate(cost_model=cost_model, trace=trace) as report:
        for _ in range(launches):
            out = np.asarray(jax.jit(mapped)(x))
    np.testing.assert_array_equal(out, np.tile(x.reshape(count, ROWS, COLUMNS), (count, 1, 1)))
    return report


@pytest.mark.parametrize("count", [2, 4, 8])
def test_time_of_a_ring(count):
    statistics = ring_all_gather(count, RATES).statistics
    shard = ROWS * COLUMNS * 4
    step = shard / 1e9 + 1e-6 + 0.5e-6  # The link, its latency, and that of the signal.
    want = (count - 1) * step + 10e-6
    assert statistics.predicted_seconds == pytest.approx(want, rel=0.02)
    assert statistics.link_bytes == {
        (d, (d + 1) % count): (count - 1) * shard for d in range(count)
    }
    assert statistics.remote_bytes == count * (count - 1) * shard
    assert statistics.signals == count * (count - 1)


def test_times_of_launches_add_up():
    once, twice = (ring_all_gather(2, RATES, launches=n).statistics for n in (1, 2))
    assert twice.predicted_seconds == pytest.approx(2 * once.predicted_seconds)


def test_no_time_without_a_model():
    assert ring_all_gather(2).statistics.predicted_seconds == 0


def test_overlap_of_copies_and_arithmetic():
    """A matmul bound by its arithmetic takes the time of its arithmetic, and little more."""
    tuning = hopper_matmul_mgpu.TuningConfig(
        tile_m=64, tile_n=64, tile_k=64, max_concurrent_steps=4
    )
    a, b = jnp.ones((256, 1024), jnp.bfloat16), jnp.ones((1024, 512), jnp.bfloat16)
    flops = 2 * 256 * 1024 * 512
    model = CostModel(matmul_flops=1e12, memory_bandwidth=1e12, launch_latency=0.0)
    with simulate(cost_model=model, core_count=4) as report:
        for _ in range(2):
            jax.block_until_ready(hopper_matmul_mgpu.matmul(a, b, None, tuning))
    statistics = report.statistics
    assert statistics.flops == 2 * flops
    assert statistics.matmul_busy_seconds == pytest.approx(2 * flops / 1e12)
    assert 2 * flops / 1e12 <= statistics.predicted_seconds < 1.1 * 2 * flops / 1e12


def test_scaled_model_stands_for_a_larger_problem():
    base = CostModel()
    scaled = base.scaled(rows=4, columns=2, depth=8)
    assert scaled.matmul_flops == base.matmul_flops / 64
    assert scaled.link_bandwidth == base.link_bandwidth / 32
    assert scaled.signal_latency == base.signal_latency


@pytest.mark.parametrize("timed", [True, False])
def test_trace_for_perfetto(timed, tmp_path):
    report = ring_all_gather(2, RATES if timed else None, trace=True)
    path = tmp_path / "trace.json"
    report.trace.save(path)
    events = json.loads(path.read_text())["traceEvents"]
    names = {e["args"]["name"] for e in events if e["ph"] == "M"}
    assert {"device 0", "device 1", "device 0 block 0"} <= names
    spans = [e for e in events if e["ph"] == "X"]
    copies = [e for e in spans if e["name"].startswith("copy to out_ref")]
    assert len(copies) == 4
    assert all(e["dur"] >= 0 for e in spans)
    if timed:
        remote = max(e["dur"] for e in copies)
        assert remote == pytest.approx(1e6 * (ROWS * COLUMNS * 4 / 1e9 + 1e-6), rel=0.01)
        assert any(e["name"] == "wait received_sem" for e in spans)
