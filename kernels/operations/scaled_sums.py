"""The matmuls whose products are added up over the devices, of operands in 8 bits with scales."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax

from stretto.kernels.operation import Axes
from stretto.kernels.operations import scattered, with_epilogue
from stretto.kernels.operations.asked import Asked
from stretto.kernels.operations.perform import decide, launch
from stretto.kernels.operations.scaled import Records, alike, each, obstacle, without_derivative
from stretto.kernels.operations.scattered import Placement
from stretto.kernels.problem import scales
from stretto.kernels.problem.options import MatmulOptions, ScatterOptions, types_of
from stretto.kernels.xla import collectives
from stretto.kernels.xla.scaled_matmul import sum_of_scaled_products


def reduce(
    records: Records,
    lhs: Any,
    rhs: Any,
    axes: Axes,
    lhs_scale: Any,
    rhs_scale: Any,
    asked: Asked,
    *,
    axis: int | None,
) -> jax.Array:
    """`matmul_reduce_scatter`, or without `axis` `matmul_all_reduce`, with scales.

    Raises:
      ValueError: as the public function.
    """
    op, transposed = records["row"].public.__name__, asked.rhs_transposed
    pairs, plain = scattered.checked_pairs(op, lhs, rhs, asked.out_dtype, transposed, scaled=True)
    granularity, of_lhs, of_rhs = _of_pairs(op, pairs, lhs_scale, rhs_scale, transposed)
    operation, first = records[granularity], pairs[0][0]
    placement = Placement.checked(op, first, axes, axis)
    sizes = scattered.sizes_of(pairs, axes, plain)
    shape = (*placement.rows, sizes["n"])
    found = scattered.fitted(op, asked.epilogue, pairs, shape, replicated=placement.replicated)
    of_tensors = granularity == "row" and all(map(_is_one, jax.tree.leaves((lhs_scale, rhs_scale))))
    scaled = dataclasses.replace(plain, scales=granularity, of_tensors=of_tensors)
    options = placement.added_to(scaled)
    options = dataclasses.replace(options, epilogue=found.form)
    types = types_of(first, pairs[1][0], options)
    call = decide(
        operation,
        sizes,
        types,
        axes,
        options,
        backend=asked.backend,
        config=asked.config,
        obstacle=obstacle(transposed, len(pairs[0])),
        copied=placement.copied_elements([first]) * types.itemsize,
        remark=functools.partial(with_epilogue.remark, found, [shape], options),
    )

    def run(given: Any) -> jax.Array:
        *operands, arrays = given
        if call is None:
            return operation.reference(given, axes, options)
        lhs, rhs, of_lhs, of_rhs = operands
        flat, of_flat = (tuple(placement.rows_for_kernel(x, 1) for x in xs) for xs in (lhs, of_lhs))
        moved = alike((flat, rhs, of_flat, of_rhs), axes)
        out = launch(moved, call.with_options(epilogue=None)).reshape(shape)
        return out if found.form is None else found.form.after((out,), arrays)[0]

    return without_derivative(op, run, (*pairs, of_lhs, of_rhs), found.arrays)


def _is_one(scale: Any) -> bool:
    return math.prod(scale.shape) == 1


def scatter_reference(operands: Any, axes: Axes, options: ScatterOptions) -> jax.Array:
    """`epilogue(reduce_scatter(sum of scaled products))`; the sum is in the result's type."""
    out = collectives.reduce_scatter(_sum(operands, options), axes, axis=options.axis)
    return _finished(out, operands, options)


def reduce_reference(operands: Any, axes: Axes, options: MatmulOptions) -> jax.Array:
    """`epilogue(all_reduce(sum of scaled products))`; the sum is in the result's type."""
    return _finished(collectives.all_reduce(_sum(operands, options), axes), operands, options)


def _sum(operands: Any, options: MatmulOptions) -> jax.Array:
    lhs, rhs, lhs_scale, rhs_scale, *_ = operands
    kind: Any = options.scales  # Scales are there: the record without scales serves other calls.
    total = sum_of_scaled_products(
        lhs, rhs, lhs_scale, rhs_scale, kind, rhs_transposed=options.rhs_transposed
    )
    return total.astype(options.out_dtype)


def _finished(out: jax.Array, operands: Any, options: MatmulOptions) -> jax.Array:
    arrays = operands[4] if len(operands) > 4 else ()
    return out if options.epilogue is None else options.epilogue.after((out,), arrays)[0]


def _of_pairs(
    op: str, pairs: Any, lhs_scale: Any, rhs_scale: Any, transposed: bool
) -> tuple[scales.Granularity, tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """The granularity of all pairs, and their scales.

    Raises:
      ValueError: scales do not fit, or pairs differ in granularity.
    """
    of_lhs, of_rhs = each(op, lhs_scale, pairs[0]), each(op, rhs_scale, pairs[1])
    found = [
        scales.checked(op, x, [y], of_x, [of_y], rhs_transposed=transposed, mx=True)
        for x, y, of_x, of_y in zip(*pairs, of_lhs, of_rhs, strict=True)
    ]
    kinds = {kind for kind, _, _ in found}
    if len(kinds) > 1:
        raise ValueError(
            f"{op}: pairs have scales of {' and '.join(sorted(kinds))}; give all the same."
        )
    return found[0][0], tuple(x for _, x, _ in found), tuple(y for _, _, (y,) in found)
