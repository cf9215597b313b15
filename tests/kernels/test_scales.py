"""Products of 8 bits with scales: the main loop alone, on one device, in the simulator."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fused_cases import BF16, F32, whole_numbers

import stretto as st
from stretto.distributed.simulator import SimulationError
from stretto.kernels.engine.blackwell import tile_config as blackwell_tiles
from stretto.kernels.engine.hopper import scaling
from stretto.kernels.engine.hopper.tile_config import (
    BLOCKS,
    BLOCKS_BY_THREE,
    LARGE_FP8,
    TileConfig,
)
from stretto.kernels.fused.local_matmul import local_matmul
from stretto.kernels.problem import scales

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
HIGH_BLOCKS = TileConfig(tile_m=256, tile_n=128, tile_k=128, num_stages=3, store_buffers=2)
SMALL = TileConfig(tile_n=64, tile_k=128, num_stages=2, store_buffers=1)


def powers_of_two(seed, *shape):
    return 2.0 ** whole_numbers(seed, *shape, largest=1)


def scales_of(granularity, m, k, n):
    """Scales of lhs and of transposed rhs."""
    if granularity == "tensor":
        return powers_of_two(2), powers_of_two(3)
    if granularity == "row":
        return powers_of_two(2, m, 1), powers_of_two(3, n, 1)
    return powers_of_two(2, m, k // 128), powers_of_two(3, -(-n // 128), k // 128)


def spread(scale, shape, rows):
    """A scale for each element."""
    if scale.ndim == 0 or scale.shape == (shape[0], 1):
        return np.broadcast_to(scale, shape)
    return np.repeat(np.repeat(scale, rows, 0)[: shape[0]], 128, 1)


def simulated(lhs, rhs, lhs_scale, rhs_scale, *, dtypes=(E4M3, E4M3), seed=0, **options):
    """The result, and the simulator's report."""

    def call(*operands):
        lhs, rhs, lhs_scale, rhs_scale = operands
        return local_matmul(
            lhs, rhs, rhs_transposed=True, lhs_scale=lhs_scale, rhs_scale=rhs_scale, **options
        )

    x, y = (jnp.asarray(a, dtype) for a, dtype in zip((lhs, rhs), dtypes, strict=True))
    given = (jnp.asarray(scale, F32) for scale in (lhs_scale, rhs_scale))
    with st.simulate(seed=seed, core_count=2, on_finding="record") as report:
        out = np.asarray(jax.jit(call)(x, y, *given))
    return out, report


@pytest.mark.parametrize(
    ("granularity", "config", "dtypes", "sizes", "out_dtype"),
    [
        ("row", LARGE_FP8, (E4M3, E4M3), (136, 256, 320), F32),
        ("row", SMALL, (E5M2, E4M3), (264, 384, 192), BF16),
        ("tensor", SMALL, (E4M3, E5M2), (136, 128, 128), BF16),
        ("block", HIGH_BLOCKS, (E4M3, E4M3), (264, 384, 320), F32),
        ("block", BLOCKS, (E4M3, E5M2), (136, 128, 192), BF16),
        ("block", BLOCKS_BY_THREE, (E5M2, E4M3), (264, 384, 192), F32),
        ("block", dataclasses.replace(SMALL, tile_m=256), (E5M2, E5M2), (272, 256, 192), F32),
    ],
)
def test_powers_of_two_are_exact(granularity, config, dtypes, sizes, out_dtype):
    m, k, n = sizes
    lhs, rhs = whole_numbers(0, m, k), whole_numbers(1, n, k)
    given = scales_of(granularity, m, k, n)
    out, report = simulated(lhs, rhs, *given, dtypes=dtypes, config=config, out_dtype=out_dtype)
    assert report.ok, str(report)
    expected = (lhs * spread(given[0], lhs.shape, 1)) @ (rhs * spread(given[1], rhs.shape, 128)).T
    np.testing.assert_array_equal(out, np.asarray(jnp.asarray(expected, out_dtype)))


def test_one_scale_goes_with_blocks():
    lhs, rhs = whole_numbers(0, 128, 256), whole_numbers(1, 128, 256)
    of_lhs, _ = scales_of("block", 128, 256, 128)
    out, _ = simulated(lhs, rhs, of_lhs, np.float32(2), out_dtype=F32)
    np.testing.assert_array_equal(out, (lhs * spread(of_lhs, lhs.shape, 1)) @ (2 * rhs).T)


def test_what_is_no_number_stays_in_its_row_and_column():
    lhs, rhs = np.ones((128, 128), np.float32), np.ones((128, 128), np.float32)
    of_rows, of_columns = np.ones((128, 1), np.float32), np.ones((128, 1), np.float32)
    of_rows[3], of_columns[5] = np.nan, np.inf
    out, _ = simulated(lhs, rhs, of_rows, of_columns, config=SMALL, out_dtype=F32)
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(out, (lhs @ rhs.T) * of_rows * of_columns.T)


def test_what_is_no_number_in_a_block_stays_in_its_row():
    lhs, rhs = whole_numbers(0, 128, 256), whole_numbers(1, 128, 256)
    of_rows, of_columns = scales_of("block", 128, 256, 128)
    of_rows[3, 1], of_rows[5, 0] = np.nan, np.inf
    out, _ = simulated(lhs, rhs, of_rows, of_columns, config=BLOCKS, out_dtype=F32)
    assert np.isnan(out[3]).all()
    assert not np.isfinite(out[5]).any()
    others = np.setdiff1d(np.arange(128), [3, 5])
    wide = lhs * spread(np.nan_to_num(of_rows, posinf=0), lhs.shape, 1)
    want = wide @ (rhs * spread(of_columns, rhs.shape, 128)).T
    np.testing.assert_array_equal(out[others], want[others])


# --- Steps that are needed ------------------------------------------------------------------------


def kinds_found(granularity, seed):
    """What the simulator finds in a kernel from which a step has been left out."""
    m, k, n = 256, 128 if granularity == "row" else 256, 256  # Of "row", less than the ring holds.
    lhs, rhs = whole_numbers(0, m, k), whole_numbers(1, n, k)
    config = SMALL if granularity == "row" else dataclasses.replace(BLOCKS, num_stages=2)
    given = scales_of(granularity, m, k, n)
    try:
        _, report = simulated(lhs, rhs, *given, config=config, seed=seed, out_dtype=F32)
    except SimulationError as error:
        report = error.report
    assert report is not None
    return report.kinds()


@pytest.mark.parametrize("granularity", ["row", "block"])
def test_without_a_bug_nothing_is_found(granularity):
    assert kinds_found(granularity, 0) == set()


def test_scales_that_nobody_waits_for_are_a_race(monkeypatch):
    monkeypatch.setattr(scaling.TileScales, "wait", lambda self: None)
    assert all("race" in kinds_found("row", seed) for seed in range(2))


def test_scales_that_are_loaded_too_early_are_a_race(monkeypatch):
    monkeypatch.setattr(scaling.TileScales, "wait_until_read", lambda self, i: None)
    assert all("race" in kinds_found("row", seed) for seed in range(2))


def test_blocks_whose_stage_nobody_waits_for_are_a_race(monkeypatch):
    monkeypatch.setattr(scaling.ScaledByStage, "wait", lambda self, stage: None)
    assert all("race" in kinds_found("block", seed) for seed in range(2))


# --- What is refused ------------------------------------------------------------------------------

X = jnp.zeros((128, 256), E4M3)


def one(*shape):
    return jnp.ones(shape, F32)


@pytest.mark.parametrize(
    ("lhs_scale", "rhs_scale", "message"),
    [
        (
            one(128),
            None,
            r"lhs_scale has shape \(128,\); it must be \(\) for one scale, \(128, 1\)",
        ),
        (one(128, 3), None, r"or \(128, 2\) for blocks of 1 x 128"),
        (
            None,
            one(1, 128),
            r"rhs_scale has shape \(1, 128\); it must be .* one of each column, or",
        ),
        (None, one(2, 2), r"or \(1, 2\) for blocks of 128 x 128"),
        (one(128, 2), one(128, 1), r"it must have blocks of 128 x 128, \[\(1, 2\)\], or be of one"),
        (one(128, 1).astype(BF16), None, "lhs_scale is bfloat16; it must be a float32 array"),
        (2.0, None, "lhs_scale is float; it must be a float32 array"),
    ],
)
def test_scales_that_do_not_fit(lhs_scale, rhs_scale, message):
    with pytest.raises(ValueError, match=message):
        local_matmul(X, X, rhs_transposed=True, lhs_scale=lhs_scale, rhs_scale=rhs_scale)


def test_operands_that_have_no_scales():
    wide = X.astype(BF16)
    with pytest.raises(ValueError, match="rhs is bfloat16, and scales are for operands of float8"):
        local_matmul(X, wide, rhs_transposed=True, lhs_scale=one())
    with pytest.raises(ValueError, match="k=192 must be a multiple of 128"):
        local_matmul(X[:, :192], X[:, :192], rhs_transposed=True, lhs_scale=one())
    with pytest.raises(ValueError, match=r"rhs in 8 bits must be transposed, \[n, k\]"):
        local_matmul(X, X.T.repeat(2, 1)[:, :128], lhs_scale=one())


@pytest.mark.parametrize(
    ("config", "scale", "error", "message"),
    [
        (TileConfig(), one(), ValueError, "tile_k=64 must be 128 for elements of 8 bits"),
        (LARGE_FP8, one(128, 2), ValueError, "tile_n=256 must divide 128, the columns that share"),
        (
            dataclasses.replace(LARGE_FP8, tile_m=192),
            one(),
            ValueError,
            "192 x 256 needs more registers than 3 warpgroups have; at most 192 x 128",
        ),
        (dataclasses.replace(BLOCKS, tile_m=64), one(), ValueError, "tile_m=64 must be 128 or 192"),
        (dataclasses.replace(LARGE_FP8, num_stages=5), one(), ValueError, "of shared memory and"),
        (blackwell_tiles.LARGE, one(), ValueError, "tile_k=64 must be 128 for elements of 8 bits"),
    ],
)
def test_tiles_that_do_not_suit(config, scale, error, message):
    with pytest.raises(error, match=message):
        local_matmul(X, X, rhs_transposed=True, lhs_scale=scale, config=config)


def test_granularities_of_groups():
    """With groups a scale of rhs has their dimension first."""
    rhs = jax.ShapeDtypeStruct((3, 200, 256), E4M3)
    for shape, kind, wanted in [
        ((3, 1, 1), "row", (3, 200, 1)),
        ((3, 200, 1), "row", (3, 200, 1)),
        ((3, 2, 2), "block", (3, 2, 2)),
    ]:
        found, of_lhs, (of_rhs,) = scales.checked(
            "grouped", X, [rhs], None, [one(*shape)], rhs_transposed=True
        )
        assert (found, of_rhs.shape) == (kind, wanted)
        assert of_lhs.shape == ((128, 1) if kind == "row" else (128, 2))
