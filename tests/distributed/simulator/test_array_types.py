"""What takes arrays apart, reduces and combines them gives XLA's values in every type."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from selection import slow

from stretto.distributed.simulator import simulate
from stretto.distributed.simulator.rules import shapes as rules_shapes

WIDE = ("int64", "uint64", "float64")  # with JAX_ENABLE_X64
INTEGERS = ("int4", "uint4", "int8", "int16", "int32", "uint8", "uint16", "uint32")
FLOATS = ("bfloat16", "float16", "float32")
TYPES = ("bool", *INTEGERS, *FLOATS, "float8_e4m3fn", "float8_e5m2", *WIDE)
QUICK = ("bool", "uint4", "int32", "uint8", "bfloat16", "float32", "float8_e5m2", "float64")


def _dot(dimensions, **settings):
    return lambda x: lax.dot_general(x, x, dimensions, **settings)


def _wide(x):
    return {"preferred_element_type": x.dtype if x.dtype.itemsize == 8 else jnp.int32}


# Which types each takes: b(ool), i(nteger), w(hole bytes of one), f(loat), e(ight-bit float).
FUNCTIONS = {
    "reduce_sum": (lambda x: lax.reduce_sum_p.bind(x, axes=(1,), out_sharding=None), "if"),
    "reduce_prod": (lambda x: lax.reduce_prod_p.bind(x, axes=(0,)), "if"),
    "reduce_max": (lambda x: lax.reduce_max(x, (0,)), "ife"),
    "reduce_min": (lambda x: lax.reduce_min(x, (0, 1)), "ife"),
    "reduce_and": (lambda x: lax.reduce_and(x, (0,)), "bw"),
    "reduce_or": (lambda x: lax.reduce_or(x, (1,)), "bw"),
    "reduce_xor": (lambda x: lax.reduce_xor(x, (0, 1)), "bw"),
    "argmax": (lambda x: lax.argmax(x, 1, jnp.int32), "ife"),
    "argmin": (lambda x: lax.argmin(x, 0, jnp.uint8), "ife"),
    "cumsum": (lambda x: lax.cumsum(x, 1), "if"),
    "cumprod": (lambda x: lax.cumprod(x, 0, reverse=True), "if"),
    "cummax": (lambda x: lax.cummax(x, 1), "if"),
    "cummin": (lambda x: lax.cummin(x, 0, reverse=True), "if"),
    "dot": (_dot((((1,), (1,)), ((), ()))), "if"),
    "batched_dot": (_dot((((1,), (1,)), ((0,), (0,)))), "if"),
    "wide_dot": (lambda x: _dot((((0,), (0,)), ((), ())), **_wide(x))(x), "w"),
    "iota": (lambda x: lax.broadcasted_iota(x.dtype, x.shape, 1), "ife"),
    "pad": (lambda x: lax.pad(x, x[0, 0], ((1, 0, 1), (0, 2, 0))), "bife"),
    "rev": (lambda x: lax.rev(x, (1,)), "bife"),
    "transpose": (lambda x: lax.transpose(x, (1, 0)), "bife"),
    "concatenate": (lambda x: lax.concatenate([x, x[:1]], 0), "bife"),
    "split": (lambda x: lax.split(x, (1, 3), 0)[1], "bife"),
    "slice": (lambda x: lax.slice(x, (1, 2), (4, 15), (1, 3)), "bife"),
    "dynamic_slice": (lambda x: lax.dynamic_slice(x, (2, 9), (2, 3)), "bife"),
    "update": (lambda x: lax.dynamic_update_slice(x, x[:2, :3], (9, 1)), "bife"),
    "reshape": (lambda x: lax.reshape(x, (2, 32)), "bife"),
    "broadcast": (lambda x: lax.broadcast_in_dim(x[0], (2, 16, 3), (1,)), "bife"),
    "scan": (lambda x: lax.scan(lambda c, row: (jnp.maximum(c, row), c), x[0], x)[1], "if"),
}
NEARLY = {
    "reduce_sum": 8,
    "reduce_prod": 8,
    "cumsum": 16,
    "cumprod": 16,
    "dot": 8,
    "batched_dot": 8,
}


def kind(dtype) -> str:
    dtype = jnp.dtype(dtype)
    if dtype == np.bool_:
        return "b"
    if jnp.issubdtype(dtype, jnp.floating):
        return "f" if dtype.itemsize > 1 else "e"
    return "i"


def operand(dtype) -> np.ndarray:
    """Seeded numbers, so large that sums of the small integers wrap, and with ties."""
    rng = np.random.default_rng(0)
    if kind(dtype) in "bi":
        low, high = (0, 2) if dtype == "bool" else (jnp.iinfo(dtype).min, jnp.iinfo(dtype).max)
        return np.array(rng.integers(max(low, -(2**31)), min(high, 2**31), (4, 16))).astype(dtype)
    return np.round(rng.normal(0, 2, (4, 16)), 1).astype(dtype)


@pytest.mark.parametrize("dtype", [x if x in QUICK else slow(x) for x in TYPES])
def test_arrays_give_what_xla_gives(dtype):
    fits = kind(dtype) + ("w" if kind(dtype) == "i" and "int4" not in dtype else "")
    functions = {n: f for n, (f, kinds) in FUNCTIONS.items() if set(fits) & set(kinds)}

    def every(x):
        return {name: function(x) for name, function in functions.items()}

    def body(x_ref, out_refs):
        for name, value in every(x_ref[...]).items():
            out_refs[name][...] = value

    with jax.enable_x64(dtype in WIDE):
        x = operand(dtype)
        want = jax.tree.map(np.asarray, jax.jit(every)(x))
        with simulate(detect_races=False):
            got = plgpu.kernel(body, out_type=jax.eval_shape(every, x))(x)
    for name, expected in want.items():
        assert got[name].dtype == expected.dtype
        wide = np.float64 if kind(expected.dtype) in "fe" else expected.dtype
        roundings = NEARLY.get(name, 0) if wide == np.float64 else 0
        np.testing.assert_allclose(
            np.asarray(got[name]).astype(wide),
            expected.astype(wide),
            rtol=roundings * float(jnp.finfo(expected.dtype).eps) if roundings else 0,
            atol=roundings * float(jnp.finfo(expected.dtype).eps) if roundings else 0,
            err_msg=f"{name} of {dtype}",
        )


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", ["reduce_max", "reduce_min", "argmax", "argmin", "cummax"])
def test_nan_comes_through(name, dtype):
    function = FUNCTIONS[name][0]
    x = operand(dtype)
    x[1, 5] = np.nan

    def body(x_ref, out_ref):
        out_ref[...] = function(x_ref[...])

    with simulate(detect_races=False):
        got = plgpu.kernel(body, out_type=jax.eval_shape(function, x))(x)
    got, want = (np.asarray(a).astype(np.float32) for a in (got, function(x)))
    np.testing.assert_array_equal(got, want)


def test_no_reduction_is_left_out():
    for name in rules_shapes.REDUCTIONS:
        assert name in FUNCTIONS or name.startswith("mosaic_gpu_")
