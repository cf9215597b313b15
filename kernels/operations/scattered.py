"""The matmuls whose products are added up over the devices: operands, references, work."""

from __future__ import annotations

import math
from typing import Any

import jax

from stretto.distributed.devices.axes import axis_size
from stretto.kernels.operation import Axes, Operand, Sizes
from stretto.kernels.problem import checks
from stretto.kernels.problem.options import MatmulOptions, ScatterOptions
from stretto.kernels.problem.problem import Problem
from stretto.kernels.problem.work import Traffic, Work
from stretto.kernels.xla import collectives
from stretto.kernels.xla.matmul import sum_of_products

type Matrices = tuple[jax.Array, ...]


def checked_pairs(
    op: str, lhs: Any, rhs: Any, out_dtype: Any, rhs_transposed: bool
) -> tuple[tuple[Matrices, Matrices], MatmulOptions]:
    """The operands as tuples of equal length, checked, and the options."""
    lhs = checks.as_matrices(op, "lhs", lhs)
    rhs = checks.as_matrices(op, "rhs", rhs)
    checks.check_pairs(op, lhs, rhs, rhs_transposed=rhs_transposed)
    dtype = checks.check_out_dtype(op, out_dtype, lhs[0].dtype)
    return (lhs, rhs), MatmulOptions(out_dtype=dtype, rhs_transposed=rhs_transposed)


def sizes_of(
    pairs: tuple[Matrices, Matrices], axes: Axes, options: MatmulOptions
) -> dict[str, int]:
    """m, k, n of the whole problem, over all devices."""
    lhs, rhs = pairs
    m, k = math.prod(lhs[0].shape[:-1]), axis_size(axes) * sum(x.shape[-1] for x in lhs)
    return dict(m=m, k=k, n=rhs[0].shape[0 if options.rhs_transposed else 1])


def reduce_scatter_reference(
    pairs: tuple[Matrices, Matrices], axes: Axes, options: ScatterOptions
) -> jax.Array:
    """`reduce_scatter(sum of lhs_i @ rhs_i)`, along `options.axis`, in the result's type."""
    product = sum_of_products(*pairs, options.rhs_transposed)
    return collectives.reduce_scatter(product.astype(options.out_dtype), axes, axis=options.axis)


def all_reduce_reference(
    pairs: tuple[Matrices, Matrices], axes: Axes, options: MatmulOptions
) -> jax.Array:
    """`all_reduce(sum of lhs_i @ rhs_i)`, in the result's type."""
    product = sum_of_products(*pairs, options.rhs_transposed)
    return collectives.all_reduce(product.astype(options.out_dtype), axes)


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
