"""The matmuls whose products are added up over the devices: operands, references, work."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from stretto.distributed.devices.axes import axis_size, varying_axes
from stretto.kernels.operation import Axes, Operand, Sizes
from stretto.kernels.operations import epilogues
from stretto.kernels.problem import checks, epilogue
from stretto.kernels.problem.epilogue import Fitted, Shape, with_arrays
from stretto.kernels.problem.options import MatmulOptions, ScatterOptions
from stretto.kernels.problem.problem import Problem
from stretto.kernels.problem.work import Traffic, Work
from stretto.kernels.xla import collectives
from stretto.kernels.xla.matmul import accumulator_dtype, sum_of_products

type Matrices = tuple[jax.Array, ...]


def checked_pairs(
    op: str, lhs: Any, rhs: Any, out_dtype: Any, rhs_transposed: bool, *, scaled: bool = False
) -> tuple[tuple[Matrices, Matrices], MatmulOptions]:
    """The operands as tuples of equal length, checked, and the options."""
    lhs = checks.as_matrices(op, "lhs", lhs)
    rhs = checks.as_matrices(op, "rhs", rhs)
    checks.check_pairs(op, lhs, rhs, rhs_transposed=rhs_transposed, scaled=scaled)
    default = jnp.bfloat16 if scaled else lhs[0].dtype
    dtype = checks.check_out_dtype(op, out_dtype, default)
    return (lhs, rhs), MatmulOptions(out_dtype=dtype, rhs_transposed=rhs_transposed)


def fitted(
    op: str,
    given: epilogues.Like,
    pairs: tuple[Matrices, Matrices],
    result: Shape,
    *,
    replicated: Axes = (),
) -> Fitted:
    """The epilogue of a sum, of whose `result` each device has its part; or, `replicated`, all.

    Raises:
      ValueError: it does not fit, or it is gated, or an array differs between devices where all
        must hold the same.
    """
    given = epilogues.of(op, given)
    if given is not None and given.gated:
        raise ValueError(
            f"{op}: the epilogue is gated, and there is one sum; pass it to all_gather_matmul, with"
            " rhs as a tuple (gate, up)."
        )
    found = epilogue.fitted(op, given, [result], accumulator_dtype(pairs[0][0].dtype))
    for index, array in enumerate(jax.tree.leaves(found.arrays)):
        if varying := varying_axes(array) & frozenset(replicated):
            raise ValueError(
                f"{op}: array {index} of the epilogue varies over {sorted(map(str, varying))}; it"
                " must be the same on every device, as the result is."
            )
    return found


def sizes_of(
    pairs: tuple[Matrices, Matrices], axes: Axes, options: MatmulOptions
) -> dict[str, int]:
    """m, k, n of the whole problem, over all devices."""
    lhs, rhs = pairs
    m, k = math.prod(lhs[0].shape[:-1]), axis_size(axes) * sum(x.shape[-1] for x in lhs)
    return dict(m=m, k=k, n=rhs[0].shape[0 if options.rhs_transposed else 1])


def reduce_scatter_reference(operands: Any, axes: Axes, options: ScatterOptions) -> jax.Array:
    """`epilogue(reduce_scatter(sum of lhs_i @ rhs_i))`, along `options.axis`.

    The sum is in the result's type. The epilogue's arrays, if it has any, come after lhs and rhs.
    """
    lhs, rhs, arrays = with_arrays(operands)
    product = sum_of_products(lhs, rhs, options.rhs_transposed).astype(options.out_dtype)
    out = collectives.reduce_scatter(product, axes, axis=options.axis)
    return out if options.epilogue is None else options.epilogue.after((out,), arrays)[0]


def all_reduce_reference(operands: Any, axes: Axes, options: MatmulOptions) -> jax.Array:
    """`epilogue(all_reduce(sum of lhs_i @ rhs_i))`, likewise."""
    lhs, rhs, arrays = with_arrays(operands)
    product = sum_of_products(lhs, rhs, options.rhs_transposed).astype(options.out_dtype)
    out = collectives.all_reduce(product, axes)
    return out if options.epilogue is None else options.epilogue.after((out,), arrays)[0]


def work(problem: Problem, *, collective: str) -> Work:
    """A device multiplies its part of the contraction; what travels is the result."""
    m, k, n = (problem.sizes[name] for name in "mkn")
    traffic = Traffic(
        collective=collective,
        shape=(m, n),
        itemsize=problem.types.out_itemsize,
        devices=problem.devices,
    )
    return Work(product=(m, -(-k // problem.devices), n), traffic=traffic)


def example_operands(sizes: Sizes, devices: int) -> tuple[Operand, ...]:
    """lhs and rhs of one device."""
    k = sizes["k"] // devices
    return Operand(shape=(sizes["m"], k)), Operand(shape=(k, sizes["n"]))
