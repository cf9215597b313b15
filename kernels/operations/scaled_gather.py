"""`all_gather_matmul` of operands in 8 bits with scales."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from stretto.distributed.devices.axes import axis_size
from stretto.kernels.operation import Axes
from stretto.kernels.operations import batches, epilogues, gathered, with_epilogue
from stretto.kernels.operations.asked import Asked
from stretto.kernels.operations.gathered import Operands
from stretto.kernels.operations.perform import decide, launch
from stretto.kernels.operations.scaled import Records, alike, each, obstacle, without_derivative
from stretto.kernels.problem import checks, scales
from stretto.kernels.problem.epilogue import fitted
from stretto.kernels.problem.options import GatherOptions, types_of
from stretto.kernels.xla import collectives
from stretto.kernels.xla.scaled_matmul import scaled_matmul


def gather(
    records: Records,
    lhs: Any,
    rhs: Any,
    axes: Axes,
    lhs_scale: Any,
    rhs_scale: Any,
    asked: Asked,
    *,
    gather_axis: str,
    axis: int | None,
    returns_gathered: bool,
) -> Any:
    """`all_gather_matmul` with scales.

    Raises:
      ValueError, NotImplementedError: as the public function.
    """
    op = gathered.OP
    if gather_axis != "m":
        raise NotImplementedError(
            f"{op}: gather_axis={gather_axis!r} is not built for scales; gather rows ('m')."
        )
    if returns_gathered:
        raise NotImplementedError(
            f"{op}: return_gathered and keep_gathered are not built for scales; gather values and"
            " scales by stretto.all_gather."
        )
    devices, transposed = axis_size(axes), asked.rhs_transposed
    operands = Operands.checked(gather_axis, axis, lhs, rhs, transposed, devices, scaled=True)
    sides = operands.sides
    granularity, of_lhs, of_rhs = scales.checked(
        op, lhs, sides, lhs_scale, each(op, rhs_scale, sides), rhs_transposed=transposed
    )
    found = fitted(op, epilogues.of(op, asked.epilogue), operands.products(), jnp.float32)
    options = GatherOptions(
        out_dtype=checks.check_out_dtype(op, asked.out_dtype, jnp.bfloat16),
        rhs_transposed=transposed,
        axis=operands.axis,
        epilogue=found.form,
        scales=granularity,
    )
    results = operands.results_shapes(found.form)
    call = decide(
        records[granularity],
        operands.sizes(),
        types_of(lhs, sides[0], options),
        axes,
        options,
        backend=asked.backend,
        config=asked.config,
        obstacle=obstacle(transposed)
        or with_epilogue.obstacle_of(found, results, options.out_dtype),
        copied=operands.copied_elements() * options.out_dtype.itemsize,
        remark=functools.partial(with_epilogue.remark, found, results, options),
    )

    def run(given: Any) -> Any:
        if call is None:
            return gather_reference(given, axes, options)
        lhs, sides, of_lhs, of_rhs, arrays = given
        form = found.form
        inside = form is not None and not arrays and not form.gated
        flat = call if inside else call.with_options(epilogue=None)
        moved = batches.as_rows(lhs), sides, batches.as_rows(of_lhs), of_rhs
        outs, _ = operands.results(launch(alike(moved, axes), flat), None)
        return outs if inside or form is None else form.after(outs, arrays)

    outs = without_derivative(op, run, (lhs, sides, of_lhs, of_rhs), found.arrays)
    return gathered.as_given(outs, rhs, found.form)


def gather_reference(operands: Any, axes: Axes, options: GatherOptions) -> tuple[jax.Array, ...]:
    """`epilogue(scaled product)` of gathered lhs and each rhs, with XLA's products of 8 bits."""
    lhs, rhs, lhs_scale, rhs_scale, *arrays = operands
    kind: Any = options.scales  # There are some, or the record would be another.
    values = collectives.all_gather(lhs, axes, axis=options.axis)
    of_values = collectives.all_gather(lhs_scale, axes, axis=options.axis)
    outs = tuple(
        scaled_matmul(values, x, of_values, of_x, kind, rhs_transposed=options.rhs_transposed)
        for x, of_x in zip(rhs, rhs_scale, strict=True)
    )
    if options.epilogue is not None:
        outs = options.epilogue.results(outs, arrays[0] if arrays else ())
    return tuple(out.astype(options.out_dtype) for out in outs)
