"""`all_gather_matmul` without scales: from the caller's arguments to the results."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax

from stretto.distributed.devices.axes import axis_size
from stretto.kernels.operation import Axes, Call, Operation
from stretto.kernels.operations import epilogues, gathered, with_epilogue
from stretto.kernels.operations.asked import Asked
from stretto.kernels.operations.gathered import Operands
from stretto.kernels.operations.perform import decide
from stretto.kernels.problem import checks
from stretto.kernels.problem.epilogue import Fitted, fitted
from stretto.kernels.problem.options import GatherOptions, types_of
from stretto.kernels.xla.matmul import accumulator_dtype


def gather(
    records: Mapping[str, Operation],
    lhs: jax.Array,
    rhs: Any,
    axes: Axes,
    asked: Asked,
    *,
    gather_axis: str,
    axis: int | None,
    return_gathered: bool,
    keep_gathered: bool,
) -> Any:
    """`all_gather_matmul`; `records` are its own, by `gather_axis`.

    Raises:
      ValueError: as the public function.
    """
    op, transposed = gathered.OP, asked.rhs_transposed
    operands = Operands.checked(gather_axis, axis, lhs, rhs, transposed, axis_size(axes))
    given = epilogues.of(op, asked.epilogue)
    found = fitted(op, given, operands.products(), accumulator_dtype(lhs.dtype))
    options = GatherOptions(
        out_dtype=checks.check_out_dtype(op, asked.out_dtype, lhs.dtype),
        rhs_transposed=transposed,
        axis=operands.axis,
        epilogue=found.form,
        return_gathered=return_gathered,
        keep_gathered=keep_gathered,
    )
    results = operands.results_shapes(found.form)
    operation = records[gather_axis]
    outside = with_epilogue.outside_of(found, results, options.out_dtype)
    call = decide(
        operation,
        operands.sizes(),
        types_of(lhs, operands.sides[0], options),
        axes,
        with_epilogue.of_kernel(options, outside),
        backend=asked.backend,
        config=asked.config,
        applied=with_epilogue.applied_bytes(outside, results, options.out_dtype),
        copied=operands.copied_elements(by_kernel=True) * options.out_dtype.itemsize,
        remark=functools.partial(with_epilogue.remark, found, results, options),
    )
    if call is None:
        outs, whole = operation.reference((lhs, operands.sides, found.arrays), axes, options)
    elif outside is not None and found.form is not None:
        outs, whole = _by_kernel(operands, Fitted(), call)
        outs = found.form.after(outs, found.arrays)
    else:
        outs, whole = _by_kernel(operands, found, call)
    out = gathered.as_given(outs, rhs, found.form)
    return (out, whole) if return_gathered else out


def _by_kernel(operands: Operands, found: Fitted, call: Call) -> tuple[tuple[jax.Array, ...], Any]:
    """The kernel's products, in the dimensions of lhs, and what it gathered."""
    moved, sides, transposed = operands.for_kernel()
    by_columns = operands.gather_axis == "k"
    blocks = operands.blocks if call.split is None else 1
    flat = call.with_options(rhs_transposed=transposed, axis=1 if by_columns else 0, blocks=blocks)
    arrays = operands.arrays_for_kernel(found, blocks)
    outs, whole = with_epilogue.perform((moved, sides), arrays, flat)
    return operands.results(outs, whole, blocks)
