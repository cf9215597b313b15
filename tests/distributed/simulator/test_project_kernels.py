"""This project's fused matmuls: clean on any number of devices, and wrong if a step is left out."""

from __future__ import annotations

import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import stretto as st
from stretto.distributed.semaphores import Semaphore
from stretto.distributed.simulator import DeadlockError, simulate
from stretto.kernels.fused.all_gather_matmul import Config

BF16, F32 = jnp.bfloat16, jnp.float32
SCHEDULES = ("random", "pct", "round_robin")
IN_SHARDS, AS_ONE = Config(), Config(gather_first=True)
# Sizes of one device's operands: m_shard, k, n_shard.
AWKWARD = [(1, 8, 8), (63, 72, 136), (65, 200, 200), (128, 256, 128)]


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape, BF16)


@functools.cache  # One trace for all seeds.
def jitted(operation, count, config):
    mesh = Mesh(np.array(jax.devices()[:count]), ("x",), axis_types=(AxisType.Auto,))
    rows, columns = P("x", None), P(None, "x")
    in_specs = (columns, rows)
    out_spec = rows if operation is st.matmul_reduce_scatter else P(None, None)
    if operation is st.all_gather_matmul:
        in_specs, out_spec = (rows, columns), columns
    fn = functools.partial(operation, axis_name="x", backend="pallas", config=config)
    return jax.jit(
        jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_spec, check_vma=False)
    )


def run(operation, count, lhs, rhs, config=None, **settings):
    """Returns (result, what it should be, report)."""
    with simulate(**settings) as report:
        out = np.asarray(jitted(operation, count, config)(lhs, rhs), np.float32)
    return out, np.asarray(lhs, np.float32) @ np.asarray(rhs, np.float32), report


def all_gather_matmul(count, m, k, n, **settings):
    operands = normal(0, count * m, k), normal(1, k, count * n)
    return run(st.all_gather_matmul, count, *operands, **settings)


def reduced(operation, count, m, k, n, **settings):
    operands = normal(0, m * count, k * count), normal(1, k * count, n)
    return run(operation, count, *operands, **settings)


def assert_right(out, want, report):
    assert report.ok and report.launches == 1, str(report)
    # One rounding to bfloat16 for every time that a partial sum may be stored.
    np.testing.assert_allclose(out, want, rtol=2**-7, atol=2**-6 * np.abs(want).max())


@pytest.mark.slow  # The quick run has them in tests/kernels/test_fused_matmuls.py.
@pytest.mark.parametrize(("count", "shape"), list(zip([8, 5, 3, 2], AWKWARD, strict=True)))
def test_all_gather_matmul(count, shape):
    seed = 7 * count + shape[0]
    settings = dict(seed=seed, schedule=SCHEDULES[seed % 3])
    assert_right(*all_gather_matmul(count, *shape, config=IN_SHARDS, **settings))


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("count", [2, 3, 5, 8])
@pytest.mark.parametrize("shape", AWKWARD)
@pytest.mark.parametrize("config", [IN_SHARDS, AS_ONE], ids=["in shards", "as one"])
def test_all_gather_matmul_in_many_orders(count, shape, config):
    for seed in range(50):
        settings = dict(seed=seed, schedule=SCHEDULES[seed % 3])
        assert_right(*all_gather_matmul(count, *shape, config=config, **settings))


@pytest.mark.slow
@pytest.mark.parametrize("operation", [st.matmul_reduce_scatter, st.matmul_all_reduce])
@pytest.mark.parametrize(
    ("count", "shape"), [(2, (64, 72, 136)), (3, (8, 64, 64)), (4, (64, 128, 128))]
)
def test_reduced_matmuls(operation, count, shape):
    for seed in range(3):
        result = reduced(operation, count, *shape, seed=seed, schedule=SCHEDULES[seed])
        assert_right(*result)


def left_out(monkeypatch, method, name):
    """Makes the semaphore `name` of every kernel neither wait or nor signal, as `method` says."""
    original = getattr(Semaphore, method)

    def maybe(self, *args, **kwargs):
        if self.site.semaphore != name:
            original(self, *args, **kwargs)

    monkeypatch.setattr(Semaphore, method, maybe)


@pytest.mark.slow  # The quick run has them in tests/kernels/test_fused_seeded_bugs.py.
@pytest.mark.usefixtures("traces_apart")
class TestSteps:
    """Each synchronisation of the all-gather matmul is needed, and its absence is found."""

    def findings(self, seed):
        settings = dict(seed=seed, schedule=SCHEDULES[seed % 3], on_finding="record")
        return all_gather_matmul(3, 64, 64, 64, **settings)[2]

    @pytest.mark.parametrize("name", ["received", "released"])
    def test_dropped_signal(self, monkeypatch, name):
        left_out(monkeypatch, "signal", name)
        for seed in range(4):
            with pytest.raises(DeadlockError, match=rf"semaphore {name}\S* >= "):
                self.findings(seed)

    @pytest.mark.parametrize(("name", "kind"), [("received", "race"), ("released", "after end")])
    def test_dropped_wait(self, monkeypatch, name, kind):
        left_out(monkeypatch, "wait", name)
        for seed in range(4):
            assert kind in self.findings(seed).kinds()


MANY = """
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 33)
import test_project_kernels as tests
for seed in range(2):
    settings = dict(seed=seed, core_count=2, config=(tests.IN_SHARDS, tests.AS_ONE)[seed % 2])
    tests.assert_right(*tests.all_gather_matmul(33, 8, 64, 64, **settings))
print("right on 33 devices")
"""


@pytest.mark.slow
def test_thirty_three_devices():
    done = subprocess.run(
        [sys.executable, "-c", MANY],
        env=os.environ | {"PYTHONPATH": os.path.dirname(__file__)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert "right on 33 devices" in done.stdout, done.stderr


def test_gradients():
    """The backward pass is a simulated kernel, too."""
    lhs, rhs = normal(0, 64, 64).astype(F32), normal(1, 64, 128).astype(F32)

    def loss(lhs, rhs, operation):
        mapped = jax.shard_map(
            operation,
            mesh=Mesh(np.array(jax.devices()[:2]), ("x",)),
            in_specs=(P("x", None), P(None, "x")),
            out_specs=P(None, "x"),
            check_vma=False,
        )
        return (mapped(lhs.astype(BF16), rhs.astype(BF16)).astype(F32) ** 2).mean()

    def fused(a, b):
        return st.all_gather_matmul(a, b, "x", out_dtype=F32)

    def plain(a, b):
        return lax.all_gather(a, "x", tiled=True).astype(F32) @ b.astype(F32)

    with simulate(seed=1) as report:
        got = jax.jit(jax.grad(lambda a, b: loss(a, b, fused), (0, 1)))(lhs, rhs)
        jax.block_until_ready(got)
    assert report.ok and report.launches >= 2, str(report)
    want = jax.jit(jax.grad(lambda a, b: loss(a, b, plain), (0, 1)))(lhs, rhs)
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, atol=2e-2 * np.abs(w).max())
