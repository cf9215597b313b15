"""Operands in 8 bits with scales on Blackwell, in the simulator; nobody has run them on a GPU."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from blackwell_cases import replacing
from fused_cases import BF16, F32, whole_numbers
from jax.experimental.pallas import mosaic_gpu as plgpu

import stretto as st
from stretto.distributed.simulator import DeadlockError, SimulationError
from stretto.kernels.engine.blackwell.tile_config import (
    BLOCKS,
    LARGE_FP8,
    PAIR_BLOCKS,
    PAIR_FP8,
    TileConfig,
)
from stretto.kernels.fused.local_matmul import local_matmul

E4M3, E5M2, E8M0 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float8_e8m0fnu
SMALL = TileConfig(tile_n=64, tile_k=128, num_stages=2, store_buffers=1)
SMALL_MX = dataclasses.replace(SMALL, tile_n=128)
SMALL_PAIR = TileConfig(blocks=2, tile_m=256, tile_n=128, tile_k=128, num_stages=2, store_buffers=1)
GRANULARITIES = "row", "block", "mx"


def powers_of_two(seed, *shape):
    return 2.0 ** whole_numbers(seed, *shape, largest=1)


def scales_of(granularity, seed, rows, k, along):
    """Scales of `[rows, k]`, and one for each element; blocks have `along` rows."""
    if granularity == "row":
        scale = powers_of_two(seed, rows, 1)
        return scale, np.broadcast_to(scale, (rows, k))
    if granularity == "mx":
        scale = powers_of_two(seed, rows, k // 32)
        return scale, np.repeat(scale, 32, axis=1)
    scale = powers_of_two(seed, -(-rows // along), k // 128)
    return scale, np.repeat(np.repeat(scale, along, axis=0)[:rows], 128, axis=1)


def product(granularity, config, sizes, *, seed=0, dtypes=(E4M3, E4M3), out=F32, **settings):
    """Whether all elements are right, and the report."""
    m, k, n = sizes
    lhs, rhs = whole_numbers(seed, m, k), whole_numbers(seed + 1, n, k)
    of_lhs, spread_lhs = scales_of(granularity, seed + 2, m, k, 1)
    of_rhs, spread_rhs = scales_of(granularity, seed + 3, n, k, 128)
    operands = [jnp.asarray(x, dtype) for x, dtype in zip((lhs, rhs), dtypes, strict=True)]
    dtype = E8M0 if granularity == "mx" else F32
    operands += [jnp.asarray(scale, dtype) for scale in (of_lhs, of_rhs)]

    def call(lhs, rhs, lhs_scale, rhs_scale):
        return local_matmul(
            lhs, rhs, rhs_transposed=True, lhs_scale=lhs_scale, rhs_scale=rhs_scale,
            config=config, out_dtype=out,
        )  # fmt: skip

    settings = dict(core_count=4, on_finding="record", target="b200") | settings
    with st.simulate(seed=seed, **settings) as report:
        found = np.asarray(jax.jit(call)(*operands))
    want = jnp.asarray((lhs * spread_lhs) @ (rhs * spread_rhs).T, out)
    return np.array_equal(found, np.asarray(want)), report


@pytest.mark.parametrize(
    ("granularity", "config", "sizes", "dtypes", "out"),
    [
        ("row", None, (136, 256, 320), (E4M3, E4M3), F32),
        ("row", PAIR_FP8, (264, 384, 320), (E4M3, E5M2), BF16),
        ("block", None, (136, 384, 192), (E5M2, E4M3), BF16),
        ("block", SMALL, (264, 256, 192), (E5M2, E5M2), F32),
        ("block", PAIR_BLOCKS, (264, 384, 192), (E4M3, E4M3), F32),
        ("mx", None, (136, 384, 192), (E4M3, E5M2), BF16),
        ("mx", PAIR_BLOCKS, (264, 256, 320), (E4M3, E4M3), F32),
    ],
)
def test_powers_of_two_are_exact(granularity, config, sizes, dtypes, out):
    right, report = product(granularity, config, sizes, dtypes=dtypes, out=out)
    assert right and report.ok and not report.warnings, str(report)


@pytest.mark.slow
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("seed", range(20))
def test_many_orders(granularity, seed):
    alone = SMALL_MX if granularity == "mx" else SMALL
    for config in (alone, SMALL_PAIR):
        right, report = product(granularity, config, (520, 384, 256), seed=seed)
        assert right and report.ok and not report.warnings, str(report)


def test_scales_that_are_left_out_are_ones():
    lhs, rhs = whole_numbers(0, 128, 128), whole_numbers(1, 128, 128)
    scale, spread = scales_of("mx", 2, 128, 128, 1)
    call = functools.partial(local_matmul, rhs_transposed=True, out_dtype=F32)
    with st.simulate(target="b200"):
        x, y = jnp.asarray(lhs, E4M3), jnp.asarray(rhs, E4M3)
        out = np.asarray(call(x, y, rhs_scale=jnp.asarray(scale, E8M0)))
    np.testing.assert_array_equal(out, lhs @ (rhs * spread).T)


# --- Steps that are needed ------------------------------------------------------------------------


@pytest.fixture
def barriers(monkeypatch):
    """Leaves out the waits on the barriers of a name, or the arrivals at them."""
    jax.clear_caches()  # Nothing that was traced with a bug is used without it.
    yield replacing(monkeypatch)
    jax.clear_caches()


def several_tiles(granularity, *, pair=False):
    """The report of a kernel in which every slot is taken several times."""
    config = SMALL_PAIR if pair else SMALL_MX if granularity == "mx" else SMALL
    m, k, n = 384, 384 if granularity == "block" else 128, 256
    try:
        _, report = product(granularity, config, (m, k, n), seed=1, core_count=2)
    except SimulationError as error:
        report = error.report
    assert report is not None
    return report


@pytest.mark.parametrize(
    ("granularity", "name"),
    [
        ("row", "scales_full"),
        ("block", "scales_full"),
        ("row", "scales_empty"),
        ("block", "scales_empty"),
        ("block", "made"),
    ],
)
def test_a_wait_that_is_left_out_is_found(barriers, granularity, name):
    """Scales read before they are there, overwritten before they are read; a drain too early."""
    barriers("barrier_wait", name)
    report = several_tiles(granularity)
    assert report.kinds() & {"race", "uninitialised"}, str(report)


def test_a_product_may_not_overwrite_one_that_is_not_drained(barriers):
    barriers("barrier_wait", "drained")
    report = several_tiles("block")
    assert "race" in report.kinds() and "totals" in str(report), str(report)


@pytest.mark.parametrize("pair", [False, True])
def test_each_product_of_blocks_needs_its_commit(barriers, pair):
    barriers("tcgen05_commit_arrive", "made")
    with pytest.raises(DeadlockError, match="waits for barrier made"):
        product("block", SMALL_PAIR if pair else SMALL, (256, 256, 128))


def test_scales_that_are_read_late_are_told(barriers, monkeypatch):
    """Without a fence the copy engine may write the next ones before a load has read."""
    monkeypatch.setattr(plgpu, "commit_smem", lambda: None)
    report = several_tiles("block")
    assert any("uncommitted load" in str(warning) for warning in report.warnings), str(report)


def test_scales_must_come_to_tensor_memory(barriers, monkeypatch):
    monkeypatch.setattr(plgpu, "async_copy_scales_to_tmem", lambda *_, **__: None)
    report = several_tiles("mx", pair=True)
    assert "uninitialised" in report.kinds() and "scales_tmem" in str(report), str(report)


# --- What is refused ------------------------------------------------------------------------------

X = jnp.zeros((128, 256), E4M3)


def call(lhs_scale, rhs_scale=None, config=None, target="b200"):
    with st.simulate(target=target):
        local_matmul(
            X, X, rhs_transposed=True, lhs_scale=lhs_scale, rhs_scale=rhs_scale, config=config
        )


@pytest.mark.parametrize(
    ("lhs_scale", "rhs_scale", "message"),
    [
        ((128, 8), ((128, 1), F32), r"rhs_scale is float32 of shape \(128, 1\); with another"),
        ((128, 2), None, r"lhs_scale is float8_e8m0fnu of shape \(128, 2\);.* \(128, 8\), one for"),
        ((128, 8), ((2, 8), E8M0), r"rhs_scale is float8_e8m0fnu of shape \(2, 8\)"),
    ],
)
def test_scales_that_do_not_fit(lhs_scale, rhs_scale, message):
    with pytest.raises(ValueError, match=message):
        call(jnp.ones(lhs_scale, E8M0), None if rhs_scale is None else jnp.ones(*rhs_scale))


@pytest.mark.parametrize(
    ("config", "shape", "dtype", "message"),
    [
        (TileConfig(), (128, 1), F32, "tile_k=64 must be 128 for elements of 8 bits"),
        (LARGE_FP8, (128, 2), F32, "tile_n=256 must divide 128, the columns that share"),
        (LARGE_FP8, (128, 8), E8M0, "tile_n=256 must be 128 for scales in float8_e8m0fnu"),
        (SMALL, (128, 8), E8M0, "tile_n=64 must be 128 for scales in float8_e8m0fnu"),
        (dataclasses.replace(BLOCKS, num_stages=7), (128, 2), F32, "of shared memory and a block"),
    ],
)
def test_tiles_that_do_not_suit(config, shape, dtype, message):
    with pytest.raises(ValueError, match=message):
        call(jnp.ones(shape, dtype), config=config)


def test_tensor_cores_of_hopper_apply_no_scales():
    with pytest.raises(NotImplementedError, match="by tensor cores of Blackwell alone; on Hopper"):
        call(jnp.ones((128, 8), E8M0), target="h100")
