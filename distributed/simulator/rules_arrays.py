"""Arithmetic on arrays: what a kernel computes in registers, with numpy.

No JAX here: running JAX from inside a callback of a running JAX program can deadlock.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from stretto.distributed.simulator.errors import UnsupportedKernelError
from stretto.distributed.simulator.program import Compiler, Step, rule, to_scalar
from stretto.distributed.simulator.rules_scalar import scalar_step


def _int_div(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if a.dtype.kind not in "iu":
        return a / b
    safe = np.where(b == 0, 1, b)
    quotient = np.abs(a) // np.abs(safe) * (np.sign(a) * np.sign(safe))
    return np.where(b == 0, -1, quotient)


def _rem(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if a.dtype.kind not in "iu":
        return np.fmod(a, b)
    return np.where(b == 0, a, np.fmod(a, np.where(b == 0, 1, b)))


def _round(x: np.ndarray, rounding_method: Any = 1, **_: Any) -> np.ndarray:
    if int(rounding_method) == 1:
        return np.rint(x)
    return np.where(x < 0, np.ceil(x - 0.5), np.floor(x + 0.5))


_erf = np.vectorize(math.erf, otypes=[np.float64])

_BINARY: dict[str, Callable] = {
    "add": np.add,
    "add_any": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": _int_div,
    "rem": _rem,
    "max": np.maximum,
    "min": np.minimum,
    "pow": np.power,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "atan2": np.arctan2,
    "nextafter": np.nextafter,
    "shift_left": np.left_shift,
    "shift_right_arithmetic": np.right_shift,
}

_UNARY: dict[str, Callable] = {
    "neg": np.negative,
    "sign": np.sign,
    "floor": np.floor,
    "ceil": np.ceil,
    "exp": np.exp,
    "exp2": np.exp2,
    "expm1": np.expm1,
    "log": np.log,
    "log1p": np.log1p,
    "tanh": np.tanh,
    "sin": np.sin,
    "cos": np.cos,
    "tan": np.tan,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "cbrt": np.cbrt,
    "logistic": lambda x: 1 / (1 + np.exp(-x)),
    "abs": np.abs,
    "not": np.invert,
    "is_finite": np.isfinite,
    "square": lambda x: x * x,
    "erf": _erf,
    "erfc": lambda x: 1 - _erf(x),
    "one_minus_square": lambda x: 1 - x * x,
}

# These keep a small float's own rounding; the rest are computed in float32, as on the device.
_EXACT = {"neg", "sign", "abs", "not", "floor", "ceil", "is_finite"}


def widen(x: np.ndarray) -> np.ndarray:
    """A float below 32 bits as float32, anything else as it is."""
    if x.dtype.itemsize < 4 and x.dtype.kind not in "iub":
        return x.astype(np.float32)
    return x


def define(compiler: Compiler, eqn: Any, compute: Callable[..., np.ndarray]) -> Step:
    """The step that applies `compute` to the operands as arrays and stores the one result."""
    ins = compiler.ins(eqn)
    (out,) = compiler.outs(eqn)
    dtypes = [v.aval.dtype for v in eqn.invars]
    aval = eqn.outvars[0].aval
    dtype, is_scalar = np.dtype(aval.dtype), aval.shape == ()

    def step(task: Any, env: list) -> None:
        args = [np.asarray(env[i], t) for i, t in zip(ins, dtypes, strict=True)]
        result = np.asarray(compute(*args)).astype(dtype, copy=False)
        env[out] = to_scalar(result) if is_scalar else result

    return False, step


def _elementwise(name: str, function: Callable) -> Callable[[Compiler, Any], Step]:
    def make(compiler: Compiler, eqn: Any) -> Step:
        if (step := scalar_step(compiler, eqn)) is not None:
            return step
        if name in _BINARY or name in _EXACT:
            return define(compiler, eqn, function)
        return define(compiler, eqn, lambda x: function(widen(x)))

    return make


for _name, _function in (*_BINARY.items(), *_UNARY.items()):
    rule(_name)(_elementwise(_name, _function))


def _identity(compiler: Compiler, eqn: Any) -> Step:
    source, out = compiler.slot(eqn.invars[0]), compiler.outs(eqn)[0]

    def step(task: Any, env: list) -> None:
        env[out] = env[source]

    return False, step


rule("stop_gradient", "copy", "multiple_of", "layout_cast", "relayout", "reshard")(_identity)


@rule("optimization_barrier")
def _all_identity(compiler: Compiler, eqn: Any) -> Step:
    pairs = list(zip(compiler.ins(eqn), compiler.outs(eqn), strict=True))

    def step(task: Any, env: list) -> None:
        for source, out in pairs:
            env[out] = env[source]

    return False, step


@rule("reduce_precision")
def _reduce_precision(compiler: Compiler, eqn: Any) -> Step:
    bits = eqn.params["exponent_bits"], eqn.params["mantissa_bits"]
    known = {(8, 23): "float32", (5, 10): "float16", (8, 7): "bfloat16"}
    if bits not in known:
        raise UnsupportedKernelError(f"reduce_precision to {bits} bits of exponent and mantissa")
    narrow = jnp.dtype(known[bits])
    return define(compiler, eqn, lambda x: x.astype(narrow))


@rule("round")
def _round_rule(compiler: Compiler, eqn: Any) -> Step:
    return define(compiler, eqn, lambda x: _round(x, **eqn.params))


@rule("integer_pow")
def _integer_pow(compiler: Compiler, eqn: Any) -> Step:
    y = eqn.params["y"]
    if y < 0:
        return define(compiler, eqn, lambda x: 1 / np.power(widen(x), -y))
    return define(compiler, eqn, lambda x: np.power(x, np.asarray(y, x.dtype)))


@rule("shift_right_logical")
def _shift_right_logical(compiler: Compiler, eqn: Any) -> Step:
    def compute(x: np.ndarray, n: np.ndarray) -> np.ndarray:
        unsigned = np.dtype(f"u{x.dtype.itemsize}")
        return (x.view(unsigned) >> n.astype(unsigned)).view(x.dtype)

    return define(compiler, eqn, compute)


@rule("population_count")
def _population_count(compiler: Compiler, eqn: Any) -> Step:
    return define(compiler, eqn, lambda x: np.bitwise_count(x.view(f"u{x.dtype.itemsize}")))


@rule("clz")
def _clz(compiler: Compiler, eqn: Any) -> Step:
    def compute(x: np.ndarray) -> np.ndarray:
        bits = x.dtype.itemsize * 8
        values = x.view(f"u{x.dtype.itemsize}").ravel().tolist()
        return np.array([bits - v.bit_length() for v in values]).reshape(x.shape)

    return define(compiler, eqn, compute)


@rule("convert_element_type")
def _convert(compiler: Compiler, eqn: Any) -> Step:
    if (step := scalar_step(compiler, eqn)) is not None:
        return step
    if "emaphore" in type(eqn.params["new_dtype"]).__name__:
        return _identity(compiler, eqn)  # A count on its way into a semaphore.
    target = np.dtype(eqn.params["new_dtype"])

    def compute(x: np.ndarray) -> np.ndarray:
        if target.kind in "iu" and x.dtype.kind not in "iub":
            limits = np.iinfo(target)
            x = np.nan_to_num(widen(x).astype(np.float64), nan=0.0)
            return np.clip(np.trunc(x), limits.min, limits.max).astype(target)
        return x.astype(target)

    return define(compiler, eqn, compute)


@rule("bitcast_convert_type")
def _bitcast(compiler: Compiler, eqn: Any) -> Step:
    target, shape = np.dtype(eqn.params["new_dtype"]), eqn.outvars[0].aval.shape
    return define(
        compiler, eqn, lambda x: np.ascontiguousarray(x).reshape(-1).view(target).reshape(shape)
    )


@rule("select_n")
def _select_n(compiler: Compiler, eqn: Any) -> Step:
    if (step := scalar_step(compiler, eqn)) is not None:
        return step

    def compute(which: np.ndarray, *cases: np.ndarray) -> np.ndarray:
        if which.ndim == 0:
            return cases[int(which)]
        if len(cases) == 2:
            return np.where(which, cases[1], cases[0])
        return np.choose(which, cases)

    return define(compiler, eqn, compute)


@rule("clamp")
def _clamp(compiler: Compiler, eqn: Any) -> Step:
    return define(compiler, eqn, lambda low, x, high: np.minimum(np.maximum(x, low), high))


@rule("mma")
def _mma(compiler: Compiler, eqn: Any) -> Step:
    return define(compiler, eqn, lambda acc, a, b: acc + matmul(a, b, acc.dtype))


def matmul(a: np.ndarray, b: np.ndarray, out_dtype: Any) -> np.ndarray:
    """`a @ b`, accumulated in float32 (or int32, or wider), as a tensor core does.

    In pieces below the size from which numpy's BLAS starts threads. Several XLA threads and tests
    share the machine's cores, and BLAS threads that spin for a core take a hundred times longer.
    """
    dtype = np.dtype(out_dtype)
    if dtype.kind not in "iu" and dtype.itemsize < 4:
        dtype = np.dtype(np.float32)
    a, b = np.ascontiguousarray(a, dtype), np.ascontiguousarray(b, dtype)
    out = np.zeros((a.shape[0], b.shape[1]), dtype)
    step = 64
    for i in range(0, a.shape[0], step):
        for j in range(0, b.shape[1], step):
            for k in range(0, a.shape[1], step):
                piece = np.matmul(a[i : i + step, k : k + step], b[k : k + step, j : j + step])
                out[i : i + step, j : j + step] += piece
    return out.astype(out_dtype, copy=False)


@rule("inline_mgpu")
def _inline_mgpu(compiler: Compiler, eqn: Any) -> Step:
    raise UnsupportedKernelError("inline_mgpu holds device code that only a GPU can run")
