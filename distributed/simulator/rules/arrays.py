"""Arithmetic on arrays: what a kernel computes in registers, with numpy.

No JAX here: running JAX from inside a callback of a running JAX program can deadlock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from stretto.distributed.simulator.program import Compiler, Step, rule, to_scalar
from stretto.distributed.simulator.reports.errors import UnsupportedKernelError
from stretto.distributed.simulator.rules.scalar import scalar_step
from stretto.distributed.simulator.state import arithmetic
from stretto.distributed.simulator.state.arithmetic import bit_width, is_float, whole_bytes, widen

type Function = Callable[..., np.ndarray]

_BINARY: dict[str, Function] = {
    "add": np.add,
    "add_any": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": arithmetic.divide,
    "rem": arithmetic.remainder,
    "max": arithmetic.maximum,
    "min": arithmetic.minimum,
    "pow": arithmetic.power,
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
    "_copysign": np.copysign,
    "clamp": arithmetic.clamp,
}

# These keep a small float's own rounding.
_EXACT: dict[str, Function] = {
    "neg": np.negative,
    "sign": arithmetic.sign,
    "floor": np.floor,
    "ceil": np.ceil,
    "abs": np.abs,
    "not": np.invert,
    "is_finite": np.isfinite,
}

# These are computed in float32, as on the device.
_ROUNDED: dict[str, Function] = {
    "exp": np.exp,
    "exp2": np.exp2,
    "expm1": np.expm1,
    "log": np.log,
    "log2": np.log2,
    "log1p": np.log1p,
    "tanh": np.tanh,
    "sin": np.sin,
    "cos": np.cos,
    "tan": np.tan,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "cbrt": np.cbrt,
    "logistic": arithmetic.logistic,
    "square": np.square,
    "erf": arithmetic.erf,
    "erfc": arithmetic.erfc,
    "one_minus_square": lambda x: 1 - x * x,
}

# These depend on the number of bits of an element.
_BY_WIDTH: dict[str, Callable[[int], Function]] = {
    "shift_left": arithmetic.shift_left,
    "shift_right_arithmetic": arithmetic.shift_right_arithmetic,
    "shift_right_logical": arithmetic.shift_right_logical,
    "population_count": arithmetic.population_count,
    "clz": arithmetic.count_leading_zeros,
}


def define(
    compiler: Compiler, eqn: Any, compute: Callable[..., np.ndarray], operands: Any = None
) -> Step:
    """The step that applies `compute` to the operands as arrays and stores the one result.

    `operands` are those of `eqn` that it takes, by default all.
    """
    operands = eqn.invars if operands is None else operands
    ins = [compiler.slot(v) for v in operands]
    (out,) = compiler.outs(eqn)
    dtypes = [v.aval.dtype for v in operands]
    aval = eqn.outvars[0].aval
    dtype, is_scalar = np.dtype(aval.dtype), aval.shape == ()

    def step(task: Any, env: list) -> None:
        args = [np.asarray(env[i], t) for i, t in zip(ins, dtypes, strict=True)]
        result = np.asarray(compute(*args)).astype(dtype, copy=False)
        env[out] = to_scalar(result) if is_scalar else result

    return False, step


def _elementwise(name: str) -> Callable[[Compiler, Any], Step]:
    def make(compiler: Compiler, eqn: Any) -> Step:
        if (step := scalar_step(compiler, eqn)) is not None:
            return step
        if name in _ROUNDED:
            function = _ROUNDED[name]
            return define(compiler, eqn, lambda x: function(widen(x)))
        if name in _BY_WIDTH:
            function = _BY_WIDTH[name](bit_width(eqn.invars[0].aval.dtype))
        else:
            function = _BINARY.get(name) or _EXACT[name]
        return define(compiler, eqn, lambda *xs: function(*map(whole_bytes, xs)))

    return make


ELEMENTWISE = {*_BINARY, *_EXACT, *_ROUNDED, *_BY_WIDTH}
"""Names of the primitives that compute each element of their result from those in its place."""

for _name in ELEMENTWISE:
    rule(_name)(_elementwise(_name))


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
def _round(compiler: Compiler, eqn: Any) -> Step:
    nearest_even = int(eqn.params["rounding_method"]) == 1
    return define(compiler, eqn, np.rint if nearest_even else arithmetic.round_away)


@rule("integer_pow")
def _integer_pow(compiler: Compiler, eqn: Any) -> Step:
    y = eqn.params["y"]
    if y < 0:
        return define(compiler, eqn, lambda x: 1 / arithmetic.integer_power(widen(x), -y))
    return define(compiler, eqn, lambda x: arithmetic.integer_power(whole_bytes(x), y))


@rule("convert_element_type")
def _convert(compiler: Compiler, eqn: Any) -> Step:
    if (step := scalar_step(compiler, eqn)) is not None:
        return step
    if "emaphore" in type(eqn.params["new_dtype"]).__name__:
        return _identity(compiler, eqn)  # A count on its way into a semaphore.
    target = np.dtype(eqn.params["new_dtype"])

    return define(compiler, eqn, lambda x: arithmetic.convert(x, target))


@rule("bitcast_convert_type")
def _bitcast(compiler: Compiler, eqn: Any) -> Step:
    target, shape = np.dtype(eqn.params["new_dtype"]), eqn.outvars[0].aval.shape
    widths = bit_width(eqn.invars[0].aval.dtype), bit_width(target)
    if widths[0] != widths[1] and min(widths) < 8:
        raise UnsupportedKernelError(
            f"a bitcast from {widths[0]} bits an element to {widths[1]}, which Mosaic GPU refuses"
        )
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


@rule("mma")
def _mma(compiler: Compiler, eqn: Any) -> Step:
    return define(compiler, eqn, lambda acc, a, b: acc + matmul(a, b, acc.dtype))


def matmul(a: np.ndarray, b: np.ndarray, out_dtype: Any) -> np.ndarray:
    """`a @ b`, accumulated in float32 (or int32, or wider), as a tensor core does.

    In pieces below the size from which numpy's BLAS starts threads. Several XLA threads and tests
    share the machine's cores, and BLAS threads that spin for a core take a hundred times longer.
    """
    dtype = np.dtype(out_dtype)
    if is_float(dtype) and dtype.itemsize < 4:
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
