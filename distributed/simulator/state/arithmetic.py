"""What each elementwise primitive computes, with numpy: the values that the kernel has on a GPU.

These are XLA's, with two exceptions where Mosaic GPU lowers to something else (0.11.2, 0.12.0.1):
`sign`, and conversions to 8-bit floats, which saturate. numpy knows less of small types than XLA
does, so integers below a byte are computed in one, and wrap when the result is stored.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np


@functools.cache
def is_float(dtype: Any) -> bool:
    """Whether `dtype` is a floating type; numpy's `kind` does not say so of the small ones."""
    return jnp.issubdtype(dtype, jnp.floating)


def bit_width(dtype: Any) -> int:
    """Bits of an element in memory: of 4-bit types, which numpy keeps in a byte each, 4."""
    dtype = np.dtype(dtype)
    if dtype.kind in "biuf":
        return dtype.itemsize * 8
    return (jnp.finfo if is_float(dtype) else jnp.iinfo)(dtype).bits


def whole_bytes(x: np.ndarray) -> np.ndarray:
    """Integers below a byte as int8 or uint8, with which numpy calculates; others as they are."""
    if x.dtype.kind in "iubf" or is_float(x.dtype):
        return x
    return x.astype(np.int8 if jnp.issubdtype(x.dtype, jnp.signedinteger) else np.uint8)


def widen(x: np.ndarray) -> np.ndarray:
    """A float below 32 bits as float32, an integer below a byte as a byte, others as they are."""
    if is_float(x.dtype) and x.dtype.itemsize < 4:
        return x.astype(np.float32)
    return whole_bytes(x)


def as_signed(x: np.ndarray) -> np.ndarray:
    """The bits of integers, read as signed."""
    return x.view(f"i{x.dtype.itemsize}")


def as_unsigned(x: np.ndarray) -> np.ndarray:
    """The bits of integers, read as unsigned."""
    return x.view(f"u{x.dtype.itemsize}")


def divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """`a / b`; of integers the quotient cut off towards zero, and all bits set where `b` is 0."""
    if is_float(a.dtype):
        return a / b
    divisor = np.where(b == 0, np.ones_like(b), b)
    quotient = a // divisor
    # `//` rounds down, which is one too few where the signs differ and something remains.
    short = (quotient * divisor != a) & ((a < 0) != (divisor < 0))
    return np.where(b == 0, ~np.zeros_like(a), quotient + short.astype(a.dtype))


def remainder(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """What `divide` leaves, with the sign of `a`; `a` itself where an integer `b` is 0."""
    if is_float(a.dtype):
        return np.fmod(a, b)
    return np.where(b == 0, a, np.fmod(a, np.where(b == 0, np.ones_like(b), b)))


def maximum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The larger; NaN if either is; and 0.0 is larger than -0.0."""
    if not is_float(a.dtype):
        return np.maximum(a, b)
    return np.where((a == 0) & (b == 0), a + b, np.maximum(a, b))


def minimum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The smaller; NaN if either is; and -0.0 is smaller than 0.0."""
    if not is_float(a.dtype):
        return np.minimum(a, b)
    return np.where((a == 0) & (b == 0), -(-a - b), np.minimum(a, b))


def power(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """`x ** y`, not of 0-d arrays: for an exponent of 0.5 that is one, numpy takes the root."""
    return np.power(np.atleast_1d(x), np.atleast_1d(y)).reshape(x.shape)


def integer_power(x: np.ndarray, y: int) -> np.ndarray:
    """`x ** y` for a `y` of at least 0, by multiplications of the type of `x`."""
    if y < 2:
        return x if y else np.ones_like(x)
    half = integer_power(x, y // 2)
    return half * half * x if y % 2 else half * half


def clamp(low: np.ndarray, x: np.ndarray, high: np.ndarray) -> np.ndarray:
    """`x` moved into `low` to `high`; as they stand, where `low` is above `high`."""
    return minimum(maximum(x, low), high)


def sign(x: np.ndarray) -> np.ndarray:
    """-1, 0 or 1. Mosaic GPU gives 0.0 for -0.0, and 1 with the sign of a NaN for a NaN."""
    if not is_float(x.dtype):
        return np.sign(x)
    return np.where(x == 0, np.zeros_like(x), np.copysign(np.ones_like(x), x))


def round_away(x: np.ndarray) -> np.ndarray:
    """The nearest whole number; of two, that further from 0."""
    whole = np.trunc(x)
    away = np.abs(x - whole) >= 0.5
    return np.copysign(np.where(away, whole + np.copysign(np.ones_like(x), x), whole), x)


def shift_left(bits: int) -> Callable[..., np.ndarray]:
    """The function that shifts a type of `bits` bits left by `n`, which is read as unsigned."""

    def compute(x: np.ndarray, n: np.ndarray) -> np.ndarray:
        n = as_unsigned(n) & _low_bits(n, bits)
        return np.where(n < bits, x << np.minimum(n, bits - 1).view(x.dtype), np.zeros_like(x))

    return compute


def shift_right_arithmetic(bits: int) -> Callable[..., np.ndarray]:
    """The function that shifts a type of `bits` bits right by `n`, its highest bit repeated.

    So it does where the type is unsigned, too.
    """

    def compute(x: np.ndarray, n: np.ndarray) -> np.ndarray:
        signed, spare = as_signed(x), x.dtype.itemsize * 8 - bits
        count = np.minimum(as_unsigned(n) & _low_bits(n, bits), bits - 1).view(signed.dtype)
        return ((signed << spare) >> spare >> count).view(x.dtype)

    return compute


def shift_right_logical(bits: int) -> Callable[..., np.ndarray]:
    """The function that shifts a type of `bits` bits right by `n`, with zeros from the left."""

    def compute(x: np.ndarray, n: np.ndarray) -> np.ndarray:
        n, unsigned = (as_unsigned(v) & _low_bits(v, bits) for v in (n, x))
        shifted = np.where(n < bits, unsigned >> np.minimum(n, bits - 1), np.zeros_like(unsigned))
        return shifted.view(x.dtype)

    return compute


def population_count(bits: int) -> Callable[..., np.ndarray]:
    """The function that counts the set bits in elements of `bits` bits."""
    return lambda x: np.bitwise_count(as_unsigned(x) & _low_bits(x, bits))


def count_leading_zeros(bits: int) -> Callable[..., np.ndarray]:
    """The function that counts the zeros before the highest set bit in elements of `bits` bits."""

    def compute(x: np.ndarray) -> np.ndarray:
        values = (as_unsigned(x) & _low_bits(x, bits)).ravel().tolist()
        return np.array([bits - v.bit_length() for v in values], np.int64).reshape(x.shape)

    return compute


def _low_bits(x: np.ndarray, bits: int) -> np.ndarray:
    return np.asarray((1 << bits) - 1, as_unsigned(x).dtype)


def convert(x: np.ndarray, target: np.dtype) -> np.ndarray:
    """`x` as type `target`. Integers wrap; floats saturate as integers and as 8-bit floats."""
    if not is_float(x.dtype):
        return whole_bytes(x).astype(target)
    if is_float(target):
        if bit_width(target) > 8 or target == x.dtype:
            return x.astype(target)
        largest = float(jnp.finfo(target).max)
        return np.clip(widen(x), -largest, largest).astype(target)
    if target.kind == "b":
        return x != 0
    limits = jnp.iinfo(target)
    whole = np.trunc(np.where(np.isnan(x), 0.0, widen(x).astype(np.float64)))
    integers = np.clip(whole, limits.min, limits.max).astype(np.int64 if limits.min else np.uint64)
    return np.where(whole >= limits.max, limits.max, integers).astype(target)


def logistic(x: np.ndarray) -> np.ndarray:
    """`1 / (1 + exp(-x))`."""
    return 1 / (1 + np.exp(-x))


erf = np.vectorize(math.erf, otypes=[np.float64])
erfc = np.vectorize(math.erfc, otypes=[np.float64])
