"""`grouped_matmul` of operands in 8 bits with scales."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from stretto.kernels.fused.group_tables import bounds
from stretto.kernels.operation import Axes, Sizes
from stretto.kernels.operations.perform import decide, launch
from stretto.kernels.operations.scaled import Records, obstacle, without_derivative
from stretto.kernels.problem import scales
from stretto.kernels.problem.options import MatmulOptions, types_of
from stretto.kernels.xla.scaled_matmul import scaled_ragged_matmul


def grouped(
    records: Records,
    operands: tuple[jax.Array, jax.Array, jax.Array],
    sizes: Sizes,
    given: tuple[Any, Any],
    options: MatmulOptions,
    *,
    config: Any,
    backend: str,
) -> jax.Array:
    """`grouped_matmul` of checked operands with the scales `given`."""
    op = "grouped_matmul"
    (lhs, rhs, rows), (lhs_scale, rhs_scale) = operands, given
    transposed = options.rhs_transposed
    granularity, of_lhs, (of_rhs,) = scales.checked(
        op, lhs, [rhs], lhs_scale, [rhs_scale], rhs_transposed=transposed, mx=True
    )
    options = dataclasses.replace(options, scales=granularity)
    types = types_of(lhs, rhs, options)
    call = decide(
        records[granularity],
        sizes,
        types,
        (),
        options,
        backend=backend,
        config=config,
        obstacle=obstacle(transposed),
    )

    def run(given: Any) -> jax.Array:
        return grouped_reference(given, (), options) if call is None else launch(given, call)

    return without_derivative(op, run, (lhs, rhs, rows, of_lhs, of_rhs))


def grouped_reference(operands: Any, axes: Axes, options: MatmulOptions) -> jax.Array:
    """`lax.ragged_dot` of the values, or of dequantised operands; rows of no group are zero."""
    del axes
    lhs, rhs, sizes, lhs_scale, rhs_scale = operands
    kind: Any = options.scales  # Scales are there: the record without scales serves other calls.
    out = scaled_ragged_matmul(
        lhs,
        rhs,
        bounds(sizes, lhs.shape[0])[1],
        lhs_scale,
        rhs_scale,
        kind,
        rhs_transposed=options.rhs_transposed,
    )
    return out.astype(options.out_dtype)
