"""`stretto.quantise`: values and scales beside what NumPy makes of the same numbers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stretto as st
from stretto.kernels.xla.quantisation import dequantise

LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
# Of [..., 200, 300]: (granularity, axis, block_scaling_dim) and the sizes of what shares a scale.
KINDS = [
    ("tensor", -1, 1, None),
    ("row", -1, 1, (1, 300)),
    ("row", -2, 1, (200, 1)),
    ("block", -1, 1, (1, 128)),
    ("block", -2, 1, (128, 1)),
    ("block", -1, 2, (128, 128)),
]


def drawn(*shape):
    return np.random.default_rng(0).normal(0, 30, shape).astype(np.float32)


def expected_scale(x, sizes, dtype):
    """By NumPy, block by block."""
    if sizes is None:
        return np.abs(x).max() / np.float32(LARGEST[dtype])
    starts = [range(0, size, step) for size, step in zip(x.shape, sizes, strict=True)]
    amax = [
        [np.abs(x[i : i + sizes[0], j : j + sizes[1]]).max() for j in starts[1]] for i in starts[0]
    ]
    return np.array(amax, np.float32) / np.float32(LARGEST[dtype])


def spread(scale, sizes, shape):
    if sizes is None:
        return np.broadcast_to(scale, shape)
    for axis in range(2):
        scale = np.repeat(scale, sizes[axis], axis)
    return scale[: shape[0], : shape[1]]


@pytest.mark.parametrize(
    ("granularity", "axis", "dim", "sizes", "dtype"),
    [*((*kind, "float8_e4m3fn") for kind in KINDS), (*KINDS[1], "float8_e5m2")],
)
def test_as_numpy_has_it(granularity, axis, dim, sizes, dtype):
    x = drawn(200, 300)
    q = jax.jit(lambda x: st.quantise(x, granularity, dtype, axis=axis, block_scaling_dim=dim))(x)
    want = expected_scale(x, sizes, dtype)
    assert q.qvalue.dtype == dtype and q.scale.dtype == jnp.float32
    assert q.scale.shape == want.shape
    np.testing.assert_allclose(q.scale, want, rtol=1e-6)
    each = spread(np.asarray(q.scale), sizes, x.shape)
    np.testing.assert_array_equal(
        np.asarray(q.qvalue, np.float32), np.asarray(jnp.asarray(x / each, dtype), np.float32)
    )
    np.testing.assert_array_equal(
        dequantise(q.qvalue, q.scale), np.asarray(q.qvalue, np.float32) * each
    )
    # The largest of each block is the type's largest number, and nothing overflows.
    assert np.abs(np.asarray(q.qvalue, np.float32)).max() == LARGEST[dtype]


def test_batches_have_scales_of_their_own():
    x = drawn(2, 200, 300)
    quantise = jax.jit(lambda x: st.quantise(x, "block", block_scaling_dim=2))
    whole = quantise(x)
    for i in range(2):
        one = quantise(x[i])
        np.testing.assert_array_equal(whole.scale[i], one.scale)
        np.testing.assert_array_equal(
            np.asarray(whole.qvalue[i], np.float32), np.asarray(one.qvalue, np.float32)
        )


def test_zeros_infinities_and_what_is_no_number():
    x = drawn(6, 256)
    x[0] = 0
    x[1, 3], x[2, 3] = np.inf, np.nan
    x[3] = 1e-37
    q = jax.jit(st.quantise)(x)
    found = np.asarray(dequantise(q.qvalue, q.scale))
    assert q.scale[0] == 1 and (found[0] == 0).all()
    assert np.isnan(found[1:3]).all(), "one infinity or NaN marks its whole row"
    assert np.isfinite(found[3:]).all()
    assert q.scale[3] == np.finfo(np.float32).tiny
    whole, by_blocks = jax.jit(
        lambda x: (st.quantise(x, "tensor").scale, st.quantise(x, "block").scale)
    )(x)
    assert np.isnan(whole)
    assert np.isnan(by_blocks[1:3, 0]).all() and np.isfinite(by_blocks[:, 1]).all()


def test_scales_that_are_powers_of_two():
    x = drawn(64, 256)
    quantise = jax.jit(lambda x: st.quantise(x, force_pow_2_scales=True))
    plain, q = jax.jit(st.quantise)(x), quantise(x)
    fraction, _ = np.frexp(np.asarray(q.scale))
    assert (fraction == 0.5).all()
    assert (q.scale >= plain.scale).all() and (q.scale < 2 * plain.scale).all()
    exact = quantise(np.full((64, 256), 448.0, np.float32))
    np.testing.assert_array_equal(exact.scale, 1)


@pytest.mark.parametrize("dtype", LARGEST)
@pytest.mark.parametrize("force_pow_2_scales", [False, True])
def test_the_largest_and_the_smallest_numbers(dtype, force_pow_2_scales):
    """Of float32 nothing overflows; what is below its least normal number may be lost."""
    x = drawn(5, 256) / 120  # At most about 1.
    x *= np.array([1e-36, 1e-40, 3e38, 1, 1], np.float32)[:, None]
    x[2, 0], x[3] = np.finfo(np.float32).max, -0.0
    x[4] = np.where(np.arange(256) == 0, 3e38, 1e-30)
    options = dict(force_pow_2_scales=force_pow_2_scales)
    q = jax.jit(lambda x: st.quantise(x, "row", dtype, **options))(x)
    values, scale = np.asarray(q.qvalue, np.float64), np.asarray(q.scale, np.float64)
    found, exact = values * scale, x.astype(np.float64)
    assert np.isfinite(found).all() and np.isfinite(np.asarray(q.scale)).all()
    error = np.linalg.norm(found - exact, axis=1) / np.maximum(
        np.linalg.norm(exact, axis=1), 1e-300
    )
    most = 0.04 if dtype == "float8_e4m3fn" else 0.08
    assert (error[[0, 2, 4]] < most).all(), error
    assert np.abs(found[1]).max() < 1e-38 and (found[3] == 0).all()


@pytest.mark.parametrize(
    ("x", "options", "message"),
    [
        (np.ones((2, 4), np.int32), {}, "x is int32; it must be floating-point"),
        ([[1.0]], {}, "x=.* must be an array"),
        (np.ones(4, np.float32), {}, "'row' needs two dimensions or more"),
        (np.ones((2, 4), np.float32), dict(granularity="column"), "'column' is not one of"),
        (np.ones((2, 4), np.float32), dict(dtype=jnp.bfloat16), "must be float8_e4m3fn or"),
        (np.ones((2, 4), np.float32), dict(dtype="e4m3"), "dtype=e4m3 must be float8_e4m3fn or"),
        (np.ones((2, 2, 4), np.float32), dict(axis=0), "one of the last two dimensions"),
        (np.ones((2, 4), np.float32), dict(axis=2), "axis=2 is out of range"),
        (np.ones((2, 4), np.float32), dict(block_scaling_dim=3), "block_scaling_dim=3 must be 1"),
    ],
)
def test_what_is_refused(x, options, message):
    with pytest.raises(ValueError, match=message):
        st.quantise(x, **options)
