"""Integer and boolean scalars, which kernels compute their indices with: Python's own numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np


def _div(a: int, b: int) -> int:
    if b == 0:
        return -1
    q = abs(a) // abs(b)
    return q if (a < 0) == (b < 0) else -q


def _rem(a: int, b: int) -> int:
    return a if b == 0 else a - b * _div(a, b)


_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: a + b,
    "add_any": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": _div,
    "rem": _rem,
    "max": max,
    "min": min,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}

# Their results may leave the range of the type, and wrap.
_WRAPPING = {"add", "sub", "mul", "add_any", "div"}

_SHIFTS = ("shift_left", "shift_right_arithmetic", "shift_right_logical")

_UNARY: dict[str, Callable[[Any], Any]] = {
    "neg": lambda a: -a,
    "abs": abs,
    "sign": lambda a: (a > 0) - (a < 0),
    "square": lambda a: a * a,
    "copy": lambda a: a,
    "copy_p": lambda a: a,
    "stop_gradient": lambda a: a,
    "multiple_of": lambda a: a,
}


def _is_whole(aval: Any) -> bool:
    dtype = getattr(aval, "dtype", None)
    return isinstance(dtype, np.dtype) and aval.shape == () and dtype.kind in "iub"


def wrapper(dtype: np.dtype) -> Callable[[int], int]:
    """A function that wraps a Python int into the range of an integer type."""
    bits = dtype.itemsize * 8
    if dtype.kind == "u":
        mask = (1 << bits) - 1
        return lambda x: x & mask
    half = 1 << (bits - 1)
    return lambda x: x if -half <= x < half else ((x + half) & (2 * half - 1)) - half


def scalar_step(compiler: Any, eqn: Any) -> tuple[bool, Callable] | None:
    """The step of an equation on whole scalars; None if it is not one of those known here."""
    name = eqn.primitive.name
    avals = [v.aval for v in (*eqn.invars, *eqn.outvars)]
    if not all(_is_whole(a) for a in avals):
        return None
    out_dtype = np.dtype(eqn.outvars[0].aval.dtype)
    if name in _BINARY:
        a, b = compiler.ins(eqn)
        return _binary(name, a, b, compiler.outs(eqn)[0], out_dtype)
    if name in _SHIFTS:
        x, count = compiler.ins(eqn)
        return _shift(name, x, count, compiler.outs(eqn)[0], out_dtype)
    if name in _UNARY and out_dtype.kind != "b":
        (a,) = compiler.ins(eqn)
        (out,) = compiler.outs(eqn)
        op, wrap = _UNARY[name], wrapper(out_dtype)

        def unary(task: Any, env: list) -> None:
            env[out] = wrap(op(env[a]))

        return False, unary
    if name == "select_n" and len(eqn.invars) == 3:
        which, first, second = compiler.ins(eqn)
        (out,) = compiler.outs(eqn)

        def select(task: Any, env: list) -> None:
            env[out] = env[second] if env[which] else env[first]

        return False, select
    if name == "convert_element_type":
        return _convert(compiler, eqn, out_dtype)
    if name == "not":
        (a,) = compiler.ins(eqn)
        (out,) = compiler.outs(eqn)
        wrap = (lambda x: not x) if out_dtype.kind == "b" else (lambda x: wrapper(out_dtype)(~x))

        def invert(task: Any, env: list) -> None:
            env[out] = wrap(env[a])

        return False, invert
    return None


def _binary(name: str, a: int, b: int, out: int, out_dtype: np.dtype) -> tuple[bool, Callable]:
    op = _BINARY[name]
    if out_dtype.kind == "b":

        def compare(task: Any, env: list) -> None:
            env[out] = bool(op(env[a], env[b]))

        return False, compare
    if name in _WRAPPING:
        wrap = wrapper(out_dtype)

        def wrapped(task: Any, env: list) -> None:
            env[out] = wrap(op(env[a], env[b]))

        return False, wrapped

    def plain(task: Any, env: list) -> None:
        env[out] = op(env[a], env[b])

    return False, plain


def _shift(name: str, x: int, count: int, out: int, dtype: np.dtype) -> tuple[bool, Callable]:
    """A shift by a count that is read as unsigned; from the type's width on nothing is left."""
    size, wrap = dtype.itemsize, wrapper(dtype)
    unsigned, signed = wrapper(np.dtype(f"u{size}")), wrapper(np.dtype(f"i{size}"))

    def step(task: Any, env: list) -> None:
        n = min(unsigned(env[count]), size * 8)
        if name == "shift_left":
            env[out] = wrap(env[x] << n)
        elif name == "shift_right_logical":
            env[out] = wrap(unsigned(env[x]) >> n)
        else:
            env[out] = wrap(signed(env[x]) >> n)

    return False, step


def _convert(compiler: Any, eqn: Any, out_dtype: np.dtype) -> tuple[bool, Callable]:
    (a,) = compiler.ins(eqn)
    (out,) = compiler.outs(eqn)
    wrap = bool if out_dtype.kind == "b" else wrapper(out_dtype)

    def convert(task: Any, env: list) -> None:
        env[out] = wrap(int(env[a]))

    return False, convert
