"""Arrays taken apart, put together and reduced: shapes, slices, reductions, contractions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from stretto.distributed.simulator.program import Compiler, Step, rule, to_scalar
from stretto.distributed.simulator.reports.errors import UnsupportedKernelError
from stretto.distributed.simulator.rules.arrays import define
from stretto.distributed.simulator.state.arithmetic import is_float, widen


@rule("broadcast_in_dim")
def _broadcast_in_dim(compiler: Compiler, eqn: Any) -> Step:
    shape, dims = eqn.params["shape"], eqn.params["broadcast_dimensions"]

    def compute(x: np.ndarray, *_: Any) -> np.ndarray:
        inner = [1] * len(shape)
        for size, dim in zip(x.shape, dims, strict=True):
            inner[dim] = size
        return np.broadcast_to(x.reshape(inner), shape)

    return define(compiler, eqn, compute)


@rule("broadcast_to")
def _broadcast_to(compiler: Compiler, eqn: Any) -> Step:
    return define(compiler, eqn, lambda x: np.broadcast_to(x, eqn.params["shape"]))


@rule("reshape")
def _reshape(compiler: Compiler, eqn: Any) -> Step:
    return define(compiler, eqn, lambda x, *_: x.reshape(eqn.params["new_sizes"]))


@rule("squeeze", "expand_dims")
def _squeeze(compiler: Compiler, eqn: Any) -> Step:
    shape = eqn.outvars[0].aval.shape
    return define(compiler, eqn, lambda x: x.reshape(shape))


@rule("transpose")
def _transpose(compiler: Compiler, eqn: Any) -> Step:
    return define(compiler, eqn, lambda x: x.transpose(eqn.params["permutation"]))


@rule("rev")
def _rev(compiler: Compiler, eqn: Any) -> Step:
    return define(compiler, eqn, lambda x: np.flip(x, eqn.params["dimensions"]))


@rule("slice")
def _slice(compiler: Compiler, eqn: Any) -> Step:
    p = eqn.params
    strides = p["strides"] or (1,) * len(p["start_indices"])
    index = tuple(
        slice(*s) for s in zip(p["start_indices"], p["limit_indices"], strides, strict=True)
    )
    return define(compiler, eqn, lambda x: x[index])


def _clamped(starts: tuple, sizes: tuple, shape: tuple) -> tuple[slice, ...]:
    """The slice that `dynamic_slice` takes: a start too far out is moved in."""
    begin = [min(max(int(s), 0), n - size) for s, size, n in zip(starts, sizes, shape, strict=True)]
    return tuple(slice(b, b + size) for b, size in zip(begin, sizes, strict=True))


@rule("dynamic_slice")
def _dynamic_slice(compiler: Compiler, eqn: Any) -> Step:
    sizes = eqn.params["slice_sizes"]
    return define(compiler, eqn, lambda x, *starts: x[_clamped(starts, sizes, x.shape)])


@rule("dynamic_update_slice")
def _dynamic_update_slice(compiler: Compiler, eqn: Any) -> Step:
    def compute(x: np.ndarray, update: np.ndarray, *starts: Any) -> np.ndarray:
        out = x.copy()
        out[_clamped(starts, update.shape, x.shape)] = update
        return out

    return define(compiler, eqn, compute)


@rule("concatenate")
def _concatenate(compiler: Compiler, eqn: Any) -> Step:
    axis = eqn.params["dimension"]
    return define(compiler, eqn, lambda *xs: np.concatenate(xs, axis))


@rule("split")
def _split(compiler: Compiler, eqn: Any) -> Step:
    (source,), outs = compiler.ins(eqn), compiler.outs(eqn)
    cuts, axis = np.cumsum(eqn.params["sizes"])[:-1], eqn.params["axis"]

    def step(task: Any, env: list) -> None:
        for out, part in zip(outs, np.split(env[source], cuts, axis), strict=True):
            env[out] = part

    return False, step


@rule("unstack")
def _unstack(compiler: Compiler, eqn: Any) -> Step:
    (source,), outs, axis = compiler.ins(eqn), compiler.outs(eqn), eqn.params["axis"]

    def step(task: Any, env: list) -> None:
        for out, part in zip(outs, np.moveaxis(env[source], axis, 0), strict=True):
            env[out] = to_scalar(np.asarray(part)) if np.ndim(part) == 0 else part

    return False, step


@rule("pad")
def _pad(compiler: Compiler, eqn: Any) -> Step:
    config = eqn.params["padding_config"]

    def compute(x: np.ndarray, value: np.ndarray) -> np.ndarray:
        shape = [
            lo + hi + n + max(n - 1, 0) * inner
            for n, (lo, hi, inner) in zip(x.shape, config, strict=True)
        ]
        out = np.full([max(s, 0) for s in shape], value, x.dtype)
        if any(lo < 0 or hi < 0 for lo, hi, _ in config):
            raise UnsupportedKernelError("pad with a negative width")
        at = tuple(
            slice(lo, lo + n + (n - 1) * i, i + 1)
            for n, (lo, _, i) in zip(x.shape, config, strict=True)
        )
        out[at] = x
        return out

    return define(compiler, eqn, compute)


@rule("iota")
def _iota(compiler: Compiler, eqn: Any) -> Step:
    p = eqn.params
    shape, axis = p["shape"], p["dimension"]
    inner = [1] * len(shape)
    inner[axis] = shape[axis]
    line = np.arange(shape[axis]).astype(p["dtype"]).reshape(inner)
    value = np.broadcast_to(line, shape)
    return define(compiler, eqn, lambda *_: value)


REDUCTIONS: dict[str, Callable] = {
    "reduce_sum": np.sum,
    "reduce_prod": np.prod,
    "reduce_max": np.max,
    "reduce_min": np.min,
    "reduce_and": np.bitwise_and.reduce,
    "reduce_or": np.bitwise_or.reduce,
    "reduce_xor": np.bitwise_xor.reduce,
}
for _op in ("sum", "prod", "max", "min"):
    REDUCTIONS[f"mosaic_gpu_reduce_{_op}"] = REDUCTIONS[f"reduce_{_op}"]


@rule(*REDUCTIONS)
def _reduce(compiler: Compiler, eqn: Any) -> Step:
    function, axes = REDUCTIONS[eqn.primitive.name], tuple(eqn.params["axes"])
    return define(compiler, eqn, lambda x: function(widen(x), axis=axes))


@rule("argmax", "argmin")
def _arg_reduce(compiler: Compiler, eqn: Any) -> Step:
    function = np.argmax if eqn.primitive.name == "argmax" else np.argmin
    (axis,) = eqn.params["axes"]
    return define(compiler, eqn, lambda x: function(widen(x), axis=axis))


_SCANS: dict[str, Any] = {
    "cumsum": np.add,
    "cumprod": np.multiply,
    "cummax": np.maximum,
    "cummin": np.minimum,
}


@rule(*_SCANS)
def _cumulative(compiler: Compiler, eqn: Any) -> Step:
    ufunc = _SCANS[eqn.primitive.name]
    axis, reverse = eqn.params["axis"], eqn.params["reverse"]

    def compute(x: np.ndarray) -> np.ndarray:
        x = np.flip(x, axis) if reverse else x
        out = ufunc.accumulate(widen(x), axis=axis)
        return np.flip(out, axis) if reverse else out

    return define(compiler, eqn, compute)


@rule("dot_general")
def _dot_general(compiler: Compiler, eqn: Any) -> Step:
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = eqn.params["dimension_numbers"]
    out_dtype = np.dtype(eqn.outvars[0].aval.dtype)
    small = is_float(out_dtype) and out_dtype.itemsize < 4
    wide = np.dtype(np.float32) if small else out_dtype

    def compute(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        labels = iter(range(a.ndim + b.ndim))
        a_labels = [next(labels) for _ in range(a.ndim)]
        b_labels = [next(labels) for _ in range(b.ndim)]
        for i, j in zip((*lhs_contract, *lhs_batch), (*rhs_contract, *rhs_batch), strict=True):
            b_labels[j] = a_labels[i]
        out = [a_labels[i] for i in lhs_batch]
        out += [a_labels[i] for i in range(a.ndim) if i not in (*lhs_contract, *lhs_batch)]
        out += [b_labels[j] for j in range(b.ndim) if j not in (*rhs_contract, *rhs_batch)]
        return np.einsum(a.astype(wide), a_labels, b.astype(wide), b_labels, out, optimize=True)

    return define(compiler, eqn, compute)


@rule("empty", "empty2")
def _empty(compiler: Compiler, eqn: Any) -> Step:
    aval, (out,) = eqn.outvars[0].aval, compiler.outs(eqn)
    value = np.zeros(aval.shape, aval.dtype)

    def step(task: Any, env: list) -> None:
        env[out] = to_scalar(value) if not aval.shape else value

    return False, step
