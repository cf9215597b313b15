"""`grouped_matmul` of operands in 8 bits with scales."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from stretto.kernels.fused import group_activation
from stretto.kernels.fused.activated import Activated
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


def activated(
    records: Records,
    operands: tuple[jax.Array, Sequence[jax.Array], jax.Array],
    sizes: Sizes,
    given: tuple[Any, Sequence[Any]],
    options: MatmulOptions,
    activation: Callable[..., jax.Array],
    *,
    gated: bool,
    backend: str,
) -> jax.Array | None:
    """The activation of products of rows with transposed matrices, by the kernel that makes them.

    Gated, the products are gate and up: of two matrices, or of the halves of one. Rows of no group
    are undefined. None where no kernel serves the products, or none with an activation.
    """
    (lhs, sides, rows), (lhs_scale, rhs_scale) = operands, given
    granularity, of_lhs, of_rhs = scales.checked(
        "grouped_matmul", lhs, sides, lhs_scale, rhs_scale, rhs_transposed=True, mx=True
    )
    options = dataclasses.replace(options, scales=granularity)
    types = types_of(lhs, sides[0], options)
    record = records[granularity]
    call = decide(record, sizes, types, (), options, backend=backend, config=None)
    if call is None or granularity != "row":
        return None
    how: dict[str, Any] = dict(gated=gated, tiles=call.config.tiles)
    if group_activation.obstacle(lhs, sides, activation, **how) is not None:
        return None

    def run(given: Any) -> jax.Array:
        lhs, sides, rows, of_lhs, of_rhs = given
        made = Activated.of_8_bits(lhs, of_lhs, sides, of_rhs, rows, activation, **how)
        return group_activation.activated_product(
            lhs, rows, made, out_dtype=options.out_dtype, interpret=call.interpret
        )

    return without_derivative("grouped_matmul", run, (lhs, sides, rows, of_lhs, of_rhs))


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
