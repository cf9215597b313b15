"""Calls of a kernel that applies an epilogue: what it can hold, its arrays, and the derivative.

The derivative is that of the kernel's plain product, rounded, and of the function, which XLA
applies to it: so the product is what the forward pass keeps.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from stretto.kernels.choice.choice import Choice
from stretto.kernels.operation import Arrays, Call, Kernel
from stretto.kernels.operations import perform as performing
from stretto.kernels.problem.epilogue import Fitted, Shape, kind_of, with_arrays
from stretto.kernels.problem.machine import BLACKWELL, Machine
from stretto.kernels.problem.options import MatmulOptions
from stretto.kernels.problem.promotion import by_default_rules

LARGEST_ITEM = 4  # bytes


def outside_of(found: Fitted, results: Sequence[Shape], out_dtype: Any) -> str | None:
    """Why no kernel can apply an epilogue to results of such shapes, None where one can.

    XLA then applies it to the kernel's results, in the caller's dimensions: the function may use
    what it likes.
    """
    if found.form is None or found.obstacle is not None:
        return found.obstacle
    operands = bool(found.arrays) or found.form.gated
    if operands and Machine.of_mesh().architecture == BLACKWELL:
        return "an epilogue with arrays, or of two products, is built for Hopper GPUs only."
    whole = 0
    for array in found.arrays:
        apart = isinstance(array, tuple)
        for one in array if apart else [array]:
            if one.dtype.itemsize > LARGEST_ITEM:
                return f"an array of the epilogue is {one.dtype}, and kernels take up to 32 bits."
            if one.dtype.itemsize == 1 and one.dtype != jnp.bool_:
                return f"an array of the epilogue is {one.dtype}, and kernels take 16 or 32 bits."
        first = array[0] if apart else array
        kind = kind_of(first.shape, results[0])
        if kind == "elements":
            whole += 1
            if first.dtype.itemsize > jnp.dtype(out_dtype).itemsize:
                return (
                    f"an array of the epilogue is as large as the result, and of {first.dtype},"
                    f" which is wider than the result's {jnp.dtype(out_dtype)}."
                )
        if len(results) > 1 and (kind == "elements" or (kind == "rows" and apart)):
            return "an array of the epilogue has rows, and there are several right-hand sides."
    if whole > 1:
        return f"{whole} arrays of the epilogue are as large as the result; a kernel takes one."
    return None


def flat_arrays(
    arrays: Sequence[Any], results: Sequence[Shape], by_rows: Callable[[jax.Array], jax.Array]
) -> tuple[Any, ...]:
    """Arrays as a kernel takes them: `[1, n]`, `[rows, 1]` or `[rows, n]`, rows as it has them.

    Args:
      arrays: of the epilogue; an array, or a tuple of one for each result.
      results: shapes `[..., n]`.
      by_rows: `[..., n]` of a result -> `[rows, n]`, in the order of the kernel's.
    """

    def flat(array: jax.Array, result: Shape) -> jax.Array:
        array = array.reshape((1,) * (len(result) - array.ndim) + array.shape)
        if kind_of(array.shape, result) == "columns":
            return array.reshape(1, array.shape[-1])
        return by_rows(jnp.broadcast_to(array, (*result[:-1], array.shape[-1])))

    return tuple(
        tuple(flat(x, result) for x, result in zip(array, results, strict=True))
        if isinstance(array, tuple)
        else flat(array, results[0])
        for array in arrays
    )


def perform(operands: Arrays, arrays: tuple[Any, ...], call: Call) -> Arrays:
    """The results of a call, with its epilogue, if it has one; differentiable in every direction.

    `operands` are lhs and rhs; `arrays` are the epilogue's (`flat_arrays`).
    """
    if call.options.epilogue is None:
        return performing.perform(operands, call)
    return performing.perform(operands, call, by=lambda xs, call: run((*xs, arrays), call))


def run(operands: Arrays, call: Call) -> Arrays:
    """The results of a kernel that applies `call.options.epilogue`, or of one and XLA after it."""
    lhs, rhs, arrays = with_arrays(operands)
    first = [x[0] if isinstance(x, tuple) else x for x in arrays]
    lie = [(kind_of(x.shape, (2, 2)), x.dtype) for x in first]  # They are matrices by now.
    if left_to_xla(call.kernel, call.config, call.split, call.options, lie) is not None:
        return _composed((lhs, rhs, arrays), call)
    return _run((lhs, rhs, arrays), call)


def left_to_xla(
    kernel: Kernel, config: Any, split: Any, options: Any, arrays: Sequence[tuple[str, Any]]
) -> str | None:
    """Why XLA applies an epilogue to the kernel's rounded product; None where the kernel does.

    `arrays` are the epilogue's, each as how it lies along the result and its type.
    """
    if kernel.beside is None:
        return "it follows a sum over devices"
    if split is not None and (arrays or options.epilogue.gated):
        return "kernels within nodes make parts of the result"
    return kernel.beside(config, options, arrays)


def applied_bytes(outside: str | None, results: Sequence[Shape], out_dtype: Any) -> int:
    """Bytes of the results that XLA reads and writes once more where it applies the epilogue."""
    if outside is None:
        return 0
    return sum(map(math.prod, results)) * jnp.dtype(out_dtype).itemsize


def of_kernel[Options: MatmulOptions](options: Options, outside: str | None) -> Options:
    """A call's options as its kernel gets them: without an epilogue that XLA applies `outside`."""
    return options if outside is None else dataclasses.replace(options, epilogue=None)


def remark(found: Fitted, results: Sequence[Shape], options: Any, choice: Choice) -> str | None:
    """What `stretto.explain` says of an epilogue, but for a function that the kernel applies."""
    form, kernel = found.form, choice.kernel
    if form is None or choice.backend == "xla" or kernel is None:
        return None
    if (outside := outside_of(found, results, options.out_dtype)) is not None:
        return f"XLA applies the epilogue to the kernel's product: {outside.removesuffix('.')}"
    first = [x[0] if isinstance(x, tuple) else x for x in found.arrays]
    lie = [(kind_of(x.shape, results[0]), x.dtype) for x in first]
    why = left_to_xla(kernel, choice.config, choice.split, options, lie)
    if why is None and not found.arrays and not form.gated:
        return None
    if why is None:
        return "the kernel applies the epilogue to the product in registers"
    return f"XLA applies the epilogue to the kernel's product, since {why}"


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _run(operands: Arrays, call: Call) -> Arrays:
    leaves, tree = jax.tree.flatten(operands)
    return performing.launch(
        jax.tree.unflatten(tree, performing.typed_alike(call.axes, leaves)), call
    )


@_run.defjvp
@by_default_rules
def _run_jvp(call: Call, primals: Any, tangents: Any) -> tuple[Arrays, Arrays]:
    return jax.jvp(functools.partial(_composed, call=call), primals, tangents)


def _composed(operands: Arrays, call: Call) -> Arrays:
    """The plain kernel's results, and the epilogue by XLA after it."""
    lhs, rhs, arrays = operands
    form = call.options.epilogue
    results: Any = performing.run((lhs, rhs), call.with_options(epilogue=None))
    if isinstance(results, tuple):  # With what was gathered.
        products, gathered = results
        return form.after(products, arrays), gathered
    (out,) = form.after((results,), arrays)
    return out
