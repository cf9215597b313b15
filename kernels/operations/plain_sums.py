"""The matmuls whose products are added up, without scales: from arguments to the result."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax

from stretto.kernels.operation import Axes, Operation
from stretto.kernels.operations import batches, scattered, with_epilogue
from stretto.kernels.operations.asked import Asked
from stretto.kernels.operations.perform import decide
from stretto.kernels.operations.scattered import Placement
from stretto.kernels.problem.options import types_of


def reduce(
    operation: Operation, lhs: Any, rhs: Any, axes: Axes, asked: Asked, *, axis: int | None
) -> jax.Array:
    """`matmul_reduce_scatter`, or without `axis` `matmul_all_reduce`, whose record is `operation`.

    Raises:
      ValueError: as the public function.
    """
    op, transposed = operation.name, asked.rhs_transposed
    pairs, plain = scattered.checked_pairs(op, lhs, rhs, asked.out_dtype, transposed)
    placement = Placement.checked(op, pairs[0][0], axes, axis)
    sizes = scattered.sizes_of(pairs, axes, plain)
    shape = (*placement.rows, sizes["n"])
    found = scattered.fitted(op, asked.epilogue, pairs, shape, replicated=placement.replicated)
    options = dataclasses.replace(placement.added_to(plain), epilogue=found.form)
    types = types_of(pairs[0][0], pairs[1][0], options)
    outside = with_epilogue.outside_of(found, [shape], options.out_dtype)
    call = decide(
        operation,
        sizes,
        types,
        axes,
        with_epilogue.of_kernel(options, outside),
        backend=asked.backend,
        config=asked.config,
        copied=placement.copied_elements(pairs[0], by_kernel=True) * types.itemsize,
        applied=with_epilogue.applied_bytes(outside, [shape], options.out_dtype),
        remark=functools.partial(with_epilogue.remark, found, [shape], options),
    )
    if call is None:
        return operation.reference((*pairs, found.arrays), axes, options)
    blocks = placement.blocks if call.split is None else 1
    rows = tuple(placement.rows_for_kernel(x, blocks) for x in pairs[0])
    arrays = () if outside else with_epilogue.flat_arrays(found.arrays, [shape], batches.as_rows)
    flat = call if axis is None else call.with_options(axis=0, blocks=blocks)
    out = with_epilogue.perform((rows, pairs[1]), arrays, flat).reshape(shape)
    if outside is not None and found.form is not None:
        (out,) = found.form.after((out,), found.arrays)
    return out
