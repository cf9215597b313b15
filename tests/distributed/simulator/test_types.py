"""Every primitive of arithmetic, in every type that it takes, gives XLA's values.

Operands are the values at which types end or functions turn, and seeded ones, each with each.
Where Mosaic GPU lowers to something else than XLA does, the oracle is what it lowers to.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from selection import slow

from stretto.distributed.simulator import simulate
from stretto.distributed.simulator.rules import arrays as rules_arrays

INTEGERS = ("int8", "int16", "int32", "uint8", "uint16", "uint32")
WIDE = ("int64", "uint64", "float64")  # with JAX_ENABLE_X64
FLOATS = ("bfloat16", "float16", "float32")
SMALL_FLOATS = ("float8_e4m3fn", "float8_e5m2")
SMALL_INTEGERS = ("int4", "uint4")
TYPES = ("bool", *INTEGERS, *SMALL_INTEGERS, *FLOATS, *SMALL_FLOATS, *WIDE)
# Signed and not, of each kind of arithmetic.
QUICK = (
    "bool",
    "int8",
    "int32",
    "uint16",
    "int4",
    "bfloat16",
    "float32",
    "float8_e4m3fn",
    "uint64",
)
SOME = [dtype if dtype in QUICK else slow(dtype) for dtype in TYPES]

# Which types a function takes: b(ool), s(igned), u(nsigned), f(loat), e(ight-bit float),
# n(arrow integer).
NUMBERS = "sunf"
BINARY: dict[str, tuple[Callable, str]] = {
    "add": (lax.add, NUMBERS),
    "sub": (lax.sub, NUMBERS),
    "mul": (lax.mul, NUMBERS),
    "div": (lax.div, NUMBERS),
    "rem": (lax.rem, NUMBERS),
    "max": (lax.max, "bsunfe"),
    "min": (lax.min, "bsunfe"),
    "pow": (lax.pow, "f"),
    "and": (lax.bitwise_and, "bsun"),
    "or": (lax.bitwise_or, "bsun"),
    "xor": (lax.bitwise_xor, "bsun"),
    "eq": (lax.eq, "bsunfe"),
    "ne": (lax.ne, "bsunfe"),
    "lt": (lax.lt, "bsunfe"),
    "le": (lax.le, "bsunfe"),
    "gt": (lax.gt, "bsunfe"),
    "ge": (lax.ge, "bsunfe"),
    "atan2": (lax.atan2, "f"),
    "nextafter": (lax.nextafter, "f"),
    "shift_left": (lax.shift_left, "sun"),
    "shift_right_arithmetic": (lax.shift_right_arithmetic, "sun"),
    "shift_right_logical": (lax.shift_right_logical, "sun"),
    "floor_divide": (lambda x, y: x // y, "suf"),
    "modulo": (lambda x, y: x % y, "suf"),
    "copysign": (jnp.copysign, "f"),
    "select_n": (lambda x, y: lax.select_n(x > y, x, y), "sunfe"),
    "select_of_three": (lambda x, y: lax.select_n(_third(x), x, y, x), "su"),
    "clamp": (lambda x, y: lax.clamp(lax.min(x, y), y, x), NUMBERS),
}
UNARY: dict[str, tuple[Callable, str]] = {
    "neg": (lax.neg, "sunfe"),
    "sign": (lax.sign, "sun"),
    "abs": (lax.abs, "sfe"),
    "not": (lax.bitwise_not, "bsun"),
    "square": (lax.square, "suf"),
    "exp": (lax.exp, "f"),
    "exp2": (lax.exp2, "f"),
    "expm1": (lax.expm1, "f"),
    "log": (lax.log, "f"),
    "log2": (jnp.log2, "f"),
    "log1p": (lax.log1p, "f"),
    "tanh": (lax.tanh, "f"),
    "sin": (lax.sin, "f"),
    "cos": (lax.cos, "f"),
    "tan": (lax.tan, "f"),
    "sqrt": (lax.sqrt, "f"),
    "rsqrt": (lax.rsqrt, "f"),
    "cbrt": (lax.cbrt, "f"),
    "logistic": (lax.logistic, "f"),
    "erf": (lax.erf, "f"),
    "erfc": (lax.erfc, "f"),
    "floor": (lax.floor, "f"),
    "ceil": (lax.ceil, "f"),
    "is_finite": (lax.is_finite, "f"),
    "clz": (lax.clz, "sun"),
    "population_count": (lax.population_count, "su"),
    "round_away": (lambda x: lax.round(x, lax.RoundingMethod.AWAY_FROM_ZERO), "f"),
    "round_even": (lambda x: lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN), "f"),
    "cube": (lambda x: lax.integer_pow(x, 3), "suf"),
    "inverse_square": (lambda x: lax.integer_pow(x, -2), "f"),
    **{f"to_{t}": (lambda x, t=t: x.astype(t), "bsunfe") for t in TYPES if t not in SMALL_FLOATS},
}
# Correct to this many roundings of the type; the others exactly.
ROUNDINGS = {
    **dict.fromkeys(("exp", "expm1", "log", "log2", "log1p", "tanh", "sin", "cos", "tan"), 4),
    **dict.fromkeys(("sqrt", "rsqrt", "cbrt", "logistic", "erf", "erfc", "atan2", "pow"), 8),
    **dict.fromkeys(("cube", "inverse_square", "square", "modulo"), 2),
    "exp2": 64,  # XLA for CPUs takes exp of a rounded product
}


def _third(x):
    return lax.rem(x.astype(jnp.int32) & 7, jnp.full(x.shape, 3, jnp.int32))


def kind(dtype) -> str:
    dtype = jnp.dtype(dtype)
    if dtype == np.bool_:
        return "b"
    if jnp.issubdtype(dtype, jnp.floating):
        return "f" if dtype.itemsize > 1 else "e"
    if dtype.name in SMALL_INTEGERS:
        return "n"
    return "s" if jnp.issubdtype(dtype, jnp.signedinteger) else "u"


def functions_of(dtype) -> dict[str, Callable]:
    """The functions of two operands to test in `dtype`, by name."""
    found = {n: f for n, (f, kinds) in BINARY.items() if kind(dtype) in kinds}
    for name, (function, kinds) in UNARY.items():
        if kind(dtype) in kinds and not (name.removeprefix("to_") in WIDE and dtype not in WIDE):
            found[name] = functools.partial(lambda x, y, f: f(x), f=function)
    return found


def values(dtype) -> np.ndarray:
    """Values of `dtype` at which something may go wrong."""
    dtype, rng = jnp.dtype(dtype), np.random.default_rng(0)
    if dtype == np.bool_:
        return np.array([False, True])
    if jnp.issubdtype(dtype, jnp.integer):
        info = jnp.iinfo(dtype)
        some = [0, 1, 2, 3, 7, info.bits - 1, info.bits, info.bits + 1, info.max, info.max - 1]
        some += [info.min, info.min + 1, *(() if info.min == 0 else (-1, -2, -3, -7))]
        inside = [v for v in some if v <= info.max]
        found = [np.array(v).astype(dtype) for v in inside]
        return np.array([*found, *rng.integers(0, 100, 3).astype(dtype)])
    info = jnp.finfo(dtype)
    ends = [float(info.max), float(info.min), float(info.smallest_normal)]
    some = [0.0, -0.0, 1, -1, 0.5, -0.5, 1.5, 2.5, -2.5, 3, -7, 0.1, 100, -100, *ends]
    some += [np.nan, np.inf, -np.inf, *rng.normal(0, 3, 4)]
    return np.array(some).astype(dtype)


@functools.cache
def under_xla(dtype) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Each value with each, in a seeded order, and what every function makes of them."""
    found, functions = values(dtype), functions_of(dtype)
    left, right = np.meshgrid(found, found)
    order = np.random.default_rng(1).permutation(left.size)
    x, y = left.ravel()[order], right.ravel()[order]
    want = jax.jit(lambda x, y: {n: f(x, y) for n, f in functions.items()})(x, y)
    return x, y, {name: np.asarray(value) for name, value in want.items()}


def in_kernel(functions: dict[str, Callable], x, y, *, scalars: bool) -> dict[str, np.ndarray]:
    """What each function gives in one simulated kernel, of arrays or of one element at a time."""
    out = jax.eval_shape(lambda x, y: {n: f(x, y) for n, f in functions.items()}, x, y)

    def of_arrays(x_ref, y_ref, out_refs):
        for name, function in functions.items():
            out_refs[name][...] = function(x_ref[...], y_ref[...])

    def of_scalars(x_ref, y_ref, out_refs, operands, results):
        operands[0][...], operands[1][...] = x_ref[...], y_ref[...]

        @pl.loop(0, x.size)
        def _(i):
            left, right = operands[0][i], operands[1][i]
            for name, function in functions.items():
                results[name][i] = function(left, right)

        for name in functions:
            out_refs[name][...] = results[name][...]

    scratch = [
        [plgpu.SMEM(x.shape, x.dtype)] * 2,
        {n: plgpu.SMEM(o.shape, o.dtype) for n, o in out.items()},
    ]
    body = of_scalars if scalars else of_arrays
    with simulate(detect_races=False):
        got = plgpu.kernel(body, out_type=out, scratch_types=scratch if scalars else [])(x, y)
        return {name: np.asarray(value) for name, value in got.items()}


def wrong(got: np.ndarray, want: np.ndarray, roundings: int) -> np.ndarray:
    """Where `got` is not `want`: the same value, with the same sign of a zero, or nearly so."""
    if not jnp.issubdtype(want.dtype, jnp.floating):
        return got != want
    info = jnp.finfo(want.dtype)
    a, b = got.astype(np.float64), want.astype(np.float64)
    with np.errstate(invalid="ignore"):
        near = np.abs(a - b) <= roundings * (abs(b) * float(info.eps) + float(info.smallest_normal))
    same = (a == b) | (np.isnan(a) & np.isnan(b)) | (near & (roundings > 0))
    no_sign = np.isnan(b) | ((roundings > 0) & (np.abs(b) < float(info.smallest_normal)))
    return ~(same & ((np.signbit(a) == np.signbit(b)) | no_sign))


def differences(dtype, limit: int | None, *, scalars: bool) -> list[str]:
    """One line a function that gives something else in a kernel than under XLA."""
    x, y, want = under_xla(dtype)
    got = in_kernel(functions_of(dtype), x[:limit], y[:limit], scalars=scalars)
    found = []
    for name, result in got.items():
        expected = want[name][:limit]
        at = np.flatnonzero(wrong(result, expected, ROUNDINGS.get(name, 0)))
        cases = [f"({x[i]}, {y[i]}) -> {result[i]}, not {expected[i]}" for i in at[:4]]
        if cases:
            found.append(f"{name} of {dtype}, {len(at)} values: " + "; ".join(cases))
    return found


@pytest.mark.parametrize("dtype", SOME)
def test_arrays_give_what_xla_gives(dtype):
    with jax.enable_x64(dtype in WIDE):
        found = differences(dtype, None, scalars=False)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("dtype", SOME)
def test_scalars_give_what_xla_gives(dtype):
    """Scalars take another way through the interpreter than arrays."""
    with jax.enable_x64(dtype in WIDE):
        found = differences(dtype, 200, scalars=True)
    assert not found, "\n".join(found)


def test_no_function_is_left_out():
    """The functions above use every elementwise primitive that the simulator knows."""
    seen = {"add_any", "_copysign", "one_minus_square"}  # nothing public binds these
    for dtype in ("bool", "int32", "uint32", "float32"):
        x = jnp.ones(3, dtype)
        for function in functions_of(dtype).values():
            seen |= primitives_of(jax.make_jaxpr(function)(x, x))
    assert not rules_arrays.ELEMENTWISE - seen


def primitives_of(jaxpr) -> set[str]:
    found = set()
    for eqn in jaxpr.eqns:
        found.add(eqn.primitive.name)
        for value in eqn.params.values():
            if hasattr(value, "eqns"):
                found |= primitives_of(value)
    return found


def one(function, *operands):
    """What `function` gives in a simulated kernel."""
    x = operands[0]
    y = operands[-1]
    return in_kernel({"out": function}, np.asarray(x), np.asarray(y), scalars=False)["out"]


@pytest.mark.parametrize("dtype", FLOATS)
def test_sign_is_that_of_mosaic_gpu(dtype):
    """It selects between 0.0 and the operand's sign, so neither -0.0 nor NaN comes through."""
    x = np.array([-np.inf, -2.5, -0.0, 0.0, 3, np.inf, np.nan, -np.nan], dtype)
    got = one(lambda x, _: lax.sign(x), x).astype(np.float32)
    np.testing.assert_array_equal(got, np.array([-1, -1, 0, 0, 1, 1, 1, -1], np.float32))
    assert not np.signbit(got[2])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("target", SMALL_FLOATS)
def test_conversions_to_eight_bits_saturate(dtype, target):
    """Mosaic GPU emits `cvt.rn.satfinite`; XLA would give NaN, or infinity."""
    limit = float(jnp.finfo(target).max)
    x = np.array([np.inf, -np.inf, 65000, -65000, 1.0625, 3.3, -0.0, np.nan], dtype)
    got = one(lambda x, _: x.astype(target), x).astype(np.float32)
    inside = x.astype(np.float32).astype(target).astype(np.float32)[4:]
    np.testing.assert_array_equal(
        got, np.array([limit, -limit, limit, -limit, *inside], np.float32)
    )


def test_four_bits_become_eight_bit_floats():
    x = np.arange(-8, 8).astype(jnp.int4)
    got = one(lambda x, _: x.astype(jnp.float8_e4m3fn), x)
    np.testing.assert_array_equal(got.astype(np.float32), np.arange(-8, 8))
