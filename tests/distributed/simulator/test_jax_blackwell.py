"""JAX's own Blackwell kernels give the right numbers; what is wrong with them is told."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas.ops.gpu import blackwell_matmul_mgpu, blackwell_ragged_dot_mgpu
from selection import slow

from stretto.distributed.simulator import DeadlockError, simulate

SIZES = np.array([100, 0, 28, 200, 184])
SEEDS = [*range(3), *map(slow, range(3, 20))]
UNAWAITED = {"unawaited copy"}
"""Both end with stores that they never wait for."""


def whole_numbers(shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(-3, 4, shape), jnp.float16)


def matmul(*, collective, seed, n=512, resident_blocks=4):
    lhs, rhs = whole_numbers((512, 128)), whole_numbers((128, n), 1)
    config = blackwell_matmul_mgpu.TuningConfig(
        tile_m=128, tile_n=64 if collective else 128, tile_k=64, max_concurrent_steps=2,
        collective=collective, epilogue_tile_n=32, grid_tile_width=2,
    )  # fmt: skip
    with simulate(
        seed=seed, target="b200", on_finding="record", resident_blocks=resident_blocks
    ) as report:
        out = np.asarray(blackwell_matmul_mgpu.matmul_kernel(lhs, rhs, config))
    np.testing.assert_array_equal(out, np.asarray(lhs, np.float32) @ np.asarray(rhs, np.float32))
    return report


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("resident_blocks", [4, 16])
def test_matmul(seed, resident_blocks):
    """With fewer resident blocks than tiles, blocks take the place of those yet to start."""
    report = matmul(collective=False, seed=seed, resident_blocks=resident_blocks)
    assert report.kinds() == UNAWAITED, str(report)


def give_the_loop_its_cluster_axis(monkeypatch):
    """JAX's kernel leaves out `cluster_axes`, which its loop says must be passed."""
    loop = functools.partial(plgpu.dynamic_scheduling_loop, cluster_axes=("x",))
    monkeypatch.setattr(plgpu, "dynamic_scheduling_loop", loop)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("resident_blocks", [4, 16])
def test_matmul_by_pairs(seed, resident_blocks, monkeypatch):
    give_the_loop_its_cluster_axis(monkeypatch)
    report = matmul(collective=True, seed=seed, resident_blocks=resident_blocks)
    assert report.kinds() == UNAWAITED, str(report)


def test_without_the_cluster_axis_both_blocks_of_a_pair_claim_work():
    with pytest.raises(DeadlockError, match="try_cancel_barrier") as error:
        matmul(collective=True, seed=0)
    assert "race on try_cancel_buffer" in str(error.value)


def ragged_dot(*, seed, core_count, n=256, collective=True):
    lhs, rhs = whole_numbers((512, 128)), whole_numbers((len(SIZES), 128, n), 1)
    config = blackwell_ragged_dot_mgpu.TuningConfig(
        tile_m=128, tile_n=64, tile_k=64, max_concurrent_steps=2, collective=collective,
        grid_tile_width=1, grid_minor_dim=blackwell_matmul_mgpu.MatmulDimension.N,
        epilogue_tile_n=64,
    )  # fmt: skip
    sizes = jnp.asarray(SIZES, jnp.int32)
    with simulate(seed=seed, target="b200", on_finding="record", core_count=core_count) as report:
        out = blackwell_ragged_dot_mgpu.ragged_dot_kernel(lhs, rhs, sizes, config)
        out = np.asarray(out)
    want = lax.ragged_dot(lhs, rhs, sizes, preferred_element_type=jnp.float32)
    return report, (out == np.asarray(want, np.float16)).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_ragged_dot(seed):
    """As long as no block takes an accumulator a second time."""
    report, is_right = ragged_dot(seed=seed, core_count=16)
    assert is_right and report.ok, str(report)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_ragged_dot_overwrites_the_accumulator_of_the_other_block(seed):
    """Its `store_done_barrier` is no `ClusterBarrier`, as that of JAX's matmul is."""
    try:
        report, _ = ragged_dot(seed=seed, core_count=4)
    except DeadlockError as error:  # It may also wait for ever.
        report = error.report
    races = [f.message for f in report.findings if f.kind == "race"]
    for race in races:
        assert "race on acc_tmem" in race and ("block 1" in race or "block 3" in race)
        assert "plgpu.tcgen05_mma(" in race and "plgpu.async_load_tmem(" in race
    assert races


def test_the_ragged_dot_by_one_block_is_not_traced():
    """JAX's kernel asks for its place along an axis of the cluster, which it has for pairs only."""
    with pytest.raises(NameError, match="unbound axis name: x"):
        ragged_dot(seed=0, core_count=16, collective=False)
