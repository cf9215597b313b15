"""Two blocks that make a tile together on Hopper, and load rhs for each other: in the simulator."""

from __future__ import annotations

import dataclasses

import fused_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scaled_cases
from array_epilogues import with_arrays
from fused_cases import BF16, F32, whole_numbers
from jax.experimental.pallas import mosaic_gpu as plgpu
from scaled_cases import E4M3, E5M2

import stretto as st
from stretto.distributed.simulator import SimulationError
from stretto.kernels.engine import ring
from stretto.kernels.engine.hopper import matmul
from stretto.kernels.engine.hopper.tile_config import BLOCKS_BY_THREE, TileConfig
from stretto.kernels.fused import (
    all_gather_matmul,
    grouped_matmul,
    matmul_all_reduce,
    matmul_reduce_scatter,
)
from stretto.kernels.fused.local_matmul import local_matmul

PAIR_FP8 = TileConfig(tile_m=256, tile_k=128)
SMALL = dataclasses.replace(PAIR_FP8, tile_n=192, num_stages=2, store_buffers=1)
BLOCKS = dataclasses.replace(BLOCKS_BY_THREE, tile_m=384, num_stages=2)
CONFIGS = {
    "all_gather_matmul": all_gather_matmul.Config(tiles=SMALL, chunk_columns=256),
    "matmul_reduce_scatter": matmul_reduce_scatter.Config(tiles=SMALL),
    "matmul_all_reduce": matmul_all_reduce.Config(tiles=SMALL),
}
slow = pytest.mark.slow


def of_scales(kind, config, sizes, seed=0, core_count=4):
    """Whether a product in 8 bits on one device is exact, and the simulator's report."""
    m, k, n = sizes
    lhs, rhs = whole_numbers(0, m, k), whole_numbers(1, n, k)
    given = scaled_cases.scales(kind, m, k, n)

    def call(lhs, rhs, of_lhs, of_rhs):
        scales = dict(lhs_scale=of_lhs, rhs_scale=of_rhs)
        return local_matmul(lhs, rhs, rhs_transposed=True, config=config, out_dtype=F32, **scales)

    values = jnp.asarray(lhs, E4M3), jnp.asarray(rhs, E5M2)
    with st.simulate(seed=seed, core_count=core_count, on_finding="record") as report:
        out = jax.jit(call)(*values, *(jnp.asarray(scale, F32) for scale in given))
    return np.array_equal(out, scaled_cases.exact(lhs, rhs, *given)), report


@pytest.mark.parametrize(
    ("kind", "config", "sizes"),
    [
        ("row", SMALL, (264, 384, 192)),  # The last tile has rows of the first block only.
        ("block", BLOCKS, (520, 512, 192)),
        pytest.param("tensor", PAIR_FP8, (520, 512, 320), marks=slow),
    ],
)
def test_powers_of_two_are_exact(kind, config, sizes):
    right, report = of_scales(kind, config, sizes, core_count=5)  # One has no neighbour.
    assert right and report.ok, str(report)


@slow
@pytest.mark.parametrize("seed", range(20))
def test_in_any_order_of_steps(seed):
    for kind, config in (("row", SMALL), ("block", BLOCKS)):
        right, report = of_scales(kind, config, (520, 512, 320), seed)
        assert right and report.ok, str(report)


@pytest.mark.parametrize(
    "name",
    [
        "all_gather_matmul",
        pytest.param("matmul_reduce_scatter", marks=slow),
        pytest.param("matmul_all_reduce", marks=slow),
    ],
)
def test_fused_matmuls(name):
    for seed, shape in enumerate([(136, 200, 72), (264, 256, 200)]):
        with st.simulate(seed=seed, core_count=4, on_finding="record") as report:
            out, want = scaled_cases.run(name, "row", 2, shape, config=CONFIGS[name])
        assert report.ok, str(report)
        np.testing.assert_array_equal(out, want)


@slow
def test_groups_of_rows():
    with st.simulate(core_count=4) as report:
        config = grouped_matmul.Config(tiles=SMALL)
        out, want = scaled_cases.groups("row", "simulator", config=config)
    assert report.ok
    np.testing.assert_array_equal(out, want)


def test_16_bits_and_a_rhs_that_is_not_transposed():
    tiles = TileConfig(tile_m=256, tile_n=192, num_stages=2, store_buffers=1)
    lhs, rhs = whole_numbers(0, 264, 128), whole_numbers(1, 128, 192)
    with st.simulate(core_count=2) as report:
        call = jax.jit(lambda x, y: local_matmul(x, y, config=tiles, out_dtype=F32))
        out = call(jnp.asarray(lhs, BF16), jnp.asarray(rhs, BF16))
    assert report.ok
    np.testing.assert_array_equal(out, lhs @ rhs)


ODD = TileConfig(tile_m=256, tile_n=128, num_stages=3, store_buffers=2)
OF_ODD = {
    "all_gather_matmul": all_gather_matmul.Config(tiles=ODD, chunk_columns=256),
    "matmul_reduce_scatter": matmul_reduce_scatter.Config(tiles=ODD),
    "matmul_all_reduce": matmul_all_reduce.Config(tiles=ODD),
}


@pytest.mark.parametrize("sizes", [(264, 200, 264), (130, 72, 136)])
def test_odd_columns_on_one_device(sizes):
    """Each block loads half of the rows of every 8 x 64 tile of rhs."""
    lhs, rhs = fused_cases.operands(*sizes)
    with st.simulate(core_count=4) as report:
        call = jax.jit(lambda x, y: local_matmul(x, y, config=ODD))
        out = call(jnp.asarray(lhs, BF16), jnp.asarray(rhs, BF16))
    assert report.ok
    np.testing.assert_array_equal(np.asarray(out, F32), fused_cases.rounded(lhs @ rhs, BF16))


@pytest.mark.parametrize(
    ("devices", "seed"), [(2, 0), pytest.param(2, 1, marks=slow), pytest.param(4, 2, marks=slow)]
)
@pytest.mark.parametrize("name", OF_ODD)
def test_odd_columns_on_several_devices(name, devices, seed):
    lhs, rhs = fused_cases.operands(*fused_cases.whole(name, devices, 267, 136, 264), seed=seed)
    with st.simulate(seed=seed, core_count=4) as report:
        out = fused_cases.run(name, lhs, rhs, devices=devices, config=OF_ODD[name])
    assert report.ok
    np.testing.assert_array_equal(out, fused_cases.rounded(lhs @ rhs, BF16))


@pytest.mark.parametrize("columns", [136, 128], ids=["odd", "whole"])
@pytest.mark.parametrize("gated", [False, True], ids=["bias", "products"])
def test_epilogues_with_arrays(gated, columns):
    config = OF_ODD["all_gather_matmul"]
    np.testing.assert_array_equal(*with_arrays(gated, config=config, sizes=(columns, columns)))


# --- Steps that are needed ------------------------------------------------------------------------


def kinds_found(seed, k_tiles):
    """What the simulator finds in a kernel, of 4 stages, from which a step has been left out."""
    config = dataclasses.replace(SMALL, num_stages=4)
    try:
        _, report = of_scales("row", config, (256, 128 * k_tiles, 192), seed, core_count=2)
    except SimulationError as error:
        report = error.report
    assert report is not None
    return report.kinds()


@pytest.mark.usefixtures("traces_apart")
def test_a_stage_that_the_other_block_still_reads_is_a_race(monkeypatch):
    own = plgpu.Barrier(num_arrivals=2, num_barriers=4)
    monkeypatch.setattr(matmul.Matmul, "_empty", lambda self: own)
    assert any("race" in kinds_found(seed, 8) for seed in range(3))


@pytest.mark.usefixtures("traces_apart")
def test_a_block_that_does_not_wait_for_the_other_ends_too_early(monkeypatch):
    assert kinds_found(2, 4) == set()
    monkeypatch.setattr(ring.Ring, "close", lambda self: None)
    assert any("ended block" in kinds_found(seed, 4) for seed in range(8))


# --- What is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tiles", "message"),
    [
        (dict(tile_m=384, tile_n=192), "192 x 192 needs more registers than 3 warpgroups have"),
        (dict(tile_m=512), "tile_m=512 must be 128 or 192, or twice that for a pair"),
        (dict(tile_m=257), "tile_m=257 must be 128 or 192"),
    ],
)
def test_tiles_that_no_two_blocks_make(tiles, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(PAIR_FP8, **tiles).check()
