"""The records of the matmuls of operands in 8 bits with scales."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from stretto.kernels.fused import all_gather_matmul as gather_kernel
from stretto.kernels.fused import matmul_all_reduce as reduce_kernel
from stretto.kernels.fused import matmul_reduce_scatter as scatter_kernel
from stretto.kernels.fused import scaled_groups as grouped_kernel
from stretto.kernels.operation import Call, Operand, Operation, Sizes
from stretto.kernels.operations.scaled_gather import gather_reference
from stretto.kernels.operations.scaled_groups import grouped_reference
from stretto.kernels.operations.scaled_sums import reduce_reference, scatter_reference
from stretto.kernels.problem import scales
from stretto.kernels.problem.problem import Problem
from stretto.kernels.problem.work import Work


def record(kind: scales.Granularity, public: Callable[..., Any], plain: Operation) -> Operation:
    """The record of `public` with scales of a granularity: "row" (one of a tensor too) or others.

    In tables it has its own name, such as "all_gather_matmul_fp8_block". `plain` is the record of
    the same operation without scales; it has the sizes.
    """
    kernels = {
        "all_gather_matmul": gather_kernel.SCALED,
        "matmul_reduce_scatter": scatter_kernel.SCALED,
        "matmul_all_reduce": reduce_kernel.SCALED,
        "grouped_matmul": grouped_kernel.SCALED,
    }
    references: dict[str, Callable[..., Any]] = {
        "all_gather_matmul": gather_reference,
        "matmul_reduce_scatter": scatter_reference,
        "matmul_all_reduce": reduce_reference,
        "grouped_matmul": grouped_reference,
    }
    return dataclasses.replace(
        plain,
        name=f"{plain.name}_fp8" + (f"_{kind}" if kind != "row" else ""),
        public=public,
        reference=references[plain.name],
        forward=None,
        residuals_of=None,
        tangent=None,
        backward=_no_backward,
        batched=None,
        layout=None,
        joined=None,
        between_nodes=None,
        kernels=(kernels[plain.name],),
        work=functools.partial(_work, plain=plain),
        examples=dataclasses.replace(
            plain.examples,
            operands=functools.partial(_example_operands, plain=plain, kind=kind),
            values={"tensor": functools.partial(_of_tensors, plain=plain)} if kind == "row" else {},
            keywords=dict(rhs_transposed=True),
            named=("lhs_scale", "rhs_scale"),
            scales=kind,
        ),
    )


def _work(problem: Problem, *, plain: Operation) -> Work:
    """The work without scales, plus the scales of a gathered operand."""
    work = plain.work(problem)
    traffic = work.traffic
    if traffic is None or not traffic.gathers:
        return work
    rows, columns = traffic.shape
    more = {
        "row": scales.SCALE_BYTES,
        "block": scales.SCALE_BYTES * scales.blocks(columns),
        "mx": -(-columns // scales.MX_BLOCK),
    }[problem.types.scales or "row"]
    return dataclasses.replace(
        work, traffic=dataclasses.replace(traffic, shape=(rows, columns + more))
    )


def _of_tensors(sizes: Sizes, devices: int, *, plain: Operation) -> tuple[Operand, ...]:
    """The same with one scale for each operand, or for the matrix of each group."""
    *values, _, of_rhs = _example_operands(sizes, devices, plain=plain, kind="row")
    return (*values, _scale((1, 1)), _scale((*of_rhs.shape[:-2], 1, 1)))


def _example_operands(
    sizes: Sizes, devices: int, *, plain: Operation, kind: scales.Granularity
) -> tuple[Operand, ...]:
    """lhs, transposed rhs and their scales, of one device."""
    lhs, rhs, *others = plain.examples.operands(sizes, devices)
    (m, k), (*groups, _, n) = lhs.shape, rhs.shape
    shapes = [(m, 1), (*groups, n, 1)]
    if kind == "block":
        shapes = [(m, scales.blocks(k)), (*groups, scales.blocks(n), scales.blocks(k))]
    if kind == "mx":
        shapes = [(*x[:-1], -(-k // scales.MX_BLOCK)) for x in shapes]
    dtype = "float8_e8m0fnu" if kind == "mx" else "float32"
    values = [Operand(shape=shape, dtype=scales.FP8[0]) for shape in ((m, k), (*groups, n, k))]
    return (
        *values,
        *others,
        *(_scale(shape, dtype) for shape in shapes),
    )


def _scale(shape: tuple[int, ...], dtype: str = "float32") -> Operand:
    return Operand(shape=shape, dtype=dtype, draw=functools.partial(_drawn, shape=shape))


def _drawn(key: jax.Array, *, shape: tuple[int, ...]) -> jax.Array:
    """Scales between a half and one."""
    return jax.random.uniform(key, shape, jnp.float32, 0.5, 1)


def _no_backward(call: Call, residuals: Any, bars: Any) -> Any:
    del residuals, bars
    raise NotImplementedError(f"{call.operation.name} has no derivative.")
