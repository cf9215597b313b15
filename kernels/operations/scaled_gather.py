"""`all_gather_matmul` of operands in 8 bits with scales.

| `gather_axis` | what is gathered | served by |
|---|---|---|
| "m" | rows of lhs, their scales ahead of them | the kernel; scales of "mx" by XLA before it |
| "n" | rows of transposed rhs, as weights of fully sharded data parallelism | the kernel, as rows of the transposed problem; XLA for blocks |
| "k" | columns of lhs, each device's with scales of their own | XLA |

Of a transposed problem, blocks of lhs would be of 128 x 128, and the caller's are of 1 x 128.
"""  # noqa: E501

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from stretto.distributed.devices.axes import axis_size
from stretto.kernels.operation import Axes, Sizes
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
    if returns_gathered:
        raise NotImplementedError(
            f"{op}: return_gathered and keep_gathered are not built for scales; gather values and"
            " scales by stretto.all_gather."
        )
    devices, transposed = axis_size(axes), asked.rhs_transposed
    operands = Operands.checked(gather_axis, axis, lhs, rhs, transposed, devices, scaled=True)
    sides = operands.sides
    granularity, of_lhs, of_rhs = scales.checked(
        op, lhs, sides, lhs_scale, each(op, rhs_scale, sides), rhs_transposed=transposed, mx=True
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
    outside = with_epilogue.outside_of(found, results, options.out_dtype)
    call = decide(
        records[granularity],
        _sizes(operands),
        types_of(lhs, sides[0], options),
        axes,
        options,
        backend=asked.backend,
        config=asked.config,
        obstacle=obstacle(transposed) or _obstacle(gather_axis, granularity),
        applied=with_epilogue.applied_bytes(outside, results, options.out_dtype),
        copied=_copied_elements(operands) * options.out_dtype.itemsize,
        remark=functools.partial(with_epilogue.remark, found, results, options),
    )

    def run(given: Any) -> Any:
        if call is None:
            return gather_reference(given, axes, options, gather_axis=gather_axis)
        lhs, sides, of_lhs, of_rhs, arrays = given
        form = found.form
        inside = form is not None and not arrays and not form.gated and outside is None
        flat = call if inside else call.with_options(epilogue=None)
        moved = batches.as_rows(lhs), sides, batches.as_rows(of_lhs), of_rhs
        if gather_axis == "n":
            rows, _, of_rows, _ = moved
            moved = sides[0], (rows,), of_rhs[0], (of_rows,)
        if granularity == "mx":
            moved = (*moved[:2], _everywhere(moved[2], axes), moved[3])
        outs, _ = operands.results(launch(alike(moved, axes), flat), None)
        return outs if inside or form is None else form.after(outs, arrays)

    outs = without_derivative(op, run, (lhs, sides, of_lhs, of_rhs), found.arrays)
    return gathered.as_given(outs, rhs, found.form)


def _sizes(operands: Operands) -> Sizes:
    """Of the problem that the kernel sees: for "n" the transposed one."""
    sizes = operands.sizes()
    if operands.gather_axis == "n":
        return dict(m=sizes["n"], k=sizes["k"], n=sizes["m"])
    return sizes


def _copied_elements(operands: Operands) -> int:
    """Elements of the results that XLA puts in order after the kernel."""
    if operands.gather_axis == "n":
        return sum(map(math.prod, operands.products()))
    return operands.copied_elements()


def _obstacle(gather_axis: str, granularity: scales.Granularity) -> str | None:
    """Why no kernel gathers scales so; None where one does."""
    if gather_axis == "k":
        return "columns of lhs have scales of each device's own, which no kernel takes."
    if gather_axis == "n" and granularity == "block":
        return "it gathers rhs as rows of the transposed problem, and lhs has blocks of 1 x 128."
    return None


def gather_reference(
    operands: Any, axes: Axes, options: GatherOptions, *, gather_axis: str = "m"
) -> tuple[jax.Array, ...]:
    """`epilogue(scaled product)` of lhs and each rhs, one of both gathered, by XLA in 8 bits."""
    lhs, rhs, of_lhs, of_rhs, *arrays = operands
    kind: Any = options.scales  # There are some, or the record would be another.
    product = functools.partial(
        scaled_matmul, granularity=kind, rhs_transposed=options.rhs_transposed
    )
    if gather_axis == "n":
        axis = 0 if options.rhs_transposed else 1
        of_rhs = tuple(_each_column(x, of_x, axis) for x, of_x in zip(rhs, of_rhs, strict=True))
        rhs, of_rhs = (
            tuple(collectives.all_gather(x, axes, axis=axis) for x in xs) for xs in (rhs, of_rhs)
        )
    else:
        lhs = collectives.all_gather(lhs, axes, axis=options.axis)
        of_lhs = collectives.all_gather(of_lhs, axes, axis=options.axis)
    if gather_axis == "k":
        product = functools.partial(product, lhs_parts=axis_size(axes))
    outs = tuple(product(lhs, x, of_lhs, of_x) for x, of_x in zip(rhs, of_rhs, strict=True))
    if options.epilogue is not None:
        outs = options.epilogue.results(outs, arrays[0] if arrays else ())
    return tuple(out.astype(options.out_dtype) for out in outs)


def _everywhere(scale: jax.Array, axes: Axes) -> jax.Array:
    """Scales of "mx" of all devices' rows, which the kernel does not gather: 1/32 of the bytes."""
    bits = jax.lax.bitcast_convert_type(scale, jnp.uint8)
    return jax.lax.bitcast_convert_type(collectives.all_gather(bits, axes, axis=0), scale.dtype)


def _each_column(rhs: jax.Array, scale: jax.Array, axis: int) -> jax.Array:
    """A shard's scales, one for each of its columns where blocks would be cut by the next shard."""
    columns = rhs.shape[axis]
    if scale.shape[axis] == columns or columns % scales.BLOCK == 0:
        return scale
    repeated = jnp.repeat(scale, scales.BLOCK, axis)
    return jax.lax.slice_in_dim(repeated, 0, columns, axis=axis)
