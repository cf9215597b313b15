"""The matmuls of operands in 8 bits with scales: calls, references and records.

The public functions come here where a scale is given. The products are not differentiable, since
rounding to 8 bits has no derivative of use: `stretto.fp8` differentiates what it quantises itself.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from stretto.distributed.devices.axes import axis_size
from stretto.kernels.fused import all_gather_matmul as gather_kernel
from stretto.kernels.fused import grouped_matmul as grouped_kernel
from stretto.kernels.fused import matmul_all_reduce as reduce_kernel
from stretto.kernels.fused import matmul_reduce_scatter as scatter_kernel
from stretto.kernels.operation import Axes, Call, Operand, Operation, Sizes
from stretto.kernels.operations import batches, epilogues, gathered, scattered, with_epilogue
from stretto.kernels.operations.gathered import Operands
from stretto.kernels.operations.perform import decide, launch, typed_alike
from stretto.kernels.problem import checks, scales
from stretto.kernels.problem.epilogue import fitted
from stretto.kernels.problem.options import GatherOptions, MatmulOptions, ScatterOptions, types_of
from stretto.kernels.problem.problem import Problem
from stretto.kernels.problem.work import Work
from stretto.kernels.xla import collectives
from stretto.kernels.xla.scaled_matmul import (
    scaled_matmul,
    scaled_ragged_matmul,
    sum_of_scaled_products,
)

type Records = Mapping[scales.Granularity, Operation]
"""Of one operation, by the granularity of the scales."""

NOT_K_MAJOR = (
    "rhs in 8 bits is multiplied along its rows (K-major): pass it as [n, k] with"
    " rhs_transposed=True, a copy that is made once, where the weight is quantised."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """What a call asks for besides operands and scales, as the public functions take it."""

    epilogue: epilogues.Like
    out_dtype: Any
    rhs_transposed: bool
    config: Any
    backend: str


def without_derivative(op: str, run: Callable[[Any], Any], operands: Any) -> Any:
    """`run(operands)`, which refuses to be differentiated.

    Raises:
      NotImplementedError: it is.
    """

    @jax.custom_jvp
    def product(operands: Any) -> Any:
        return run(operands)

    @product.defjvp
    def _refuse(primals: Any, tangents: Any) -> Any:
        del primals, tangents
        raise NotImplementedError(
            f"{op}: a product of operands in 8 bits with scales has no derivative; differentiate"
            f" stretto.fp8.{op}, which quantises its operands itself."
        )

    return product(operands)


# --- All-gather matmul ----------------------------------------------------------------------------


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
        op, lhs, sides, lhs_scale, _each(op, rhs_scale, sides), rhs_transposed=transposed
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
        obstacle=_obstacle(transposed)
        or with_epilogue.obstacle_of(found, results, options.out_dtype),
        copied=operands.copied_elements() * options.out_dtype.itemsize,
    )

    def run(given: Any) -> Any:
        if call is None:
            return gather_reference(given, axes, options)
        lhs, sides, of_lhs, of_rhs, arrays = given
        form = found.form
        inside = form is not None and not arrays and not form.gated
        flat = call if inside else call.with_options(epilogue=None)
        moved = batches.as_rows(lhs), sides, batches.as_rows(of_lhs), of_rhs
        outs, _ = operands.results(launch(_alike(moved, axes), flat), None)
        return outs if inside or form is None else form.after(outs, arrays)

    outs = without_derivative(op, run, (lhs, sides, of_lhs, of_rhs, found.arrays))
    several = isinstance(rhs, tuple | list) and not (found.form and found.form.gated)
    return out_of(outs, several)


def out_of(outs: tuple[jax.Array, ...], several: bool) -> Any:
    """The results, or the only one."""
    return tuple(outs) if several else outs[0]


def gather_reference(operands: Any, axes: Axes, options: GatherOptions) -> tuple[jax.Array, ...]:
    """`epilogue(scaled product)` of gathered lhs and each rhs, with XLA's products of 8 bits."""
    lhs, rhs, lhs_scale, rhs_scale, *arrays = operands
    values = collectives.all_gather(lhs, axes, axis=options.axis)
    of_values = collectives.all_gather(lhs_scale, axes, axis=options.axis)
    outs = tuple(
        scaled_matmul(
            values, x, of_values, of_x, options.scales, rhs_transposed=options.rhs_transposed
        )
        for x, of_x in zip(rhs, rhs_scale, strict=True)
    )
    if options.epilogue is not None:
        outs = options.epilogue.results(outs, arrays[0] if arrays else ())
    return tuple(out.astype(options.out_dtype) for out in outs)


# --- Products that are added up over the devices --------------------------------------------------


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
    op = records["row"].public.__name__
    transposed, devices = asked.rhs_transposed, axis_size(axes)
    pairs, plain = scattered.checked_pairs(op, lhs, rhs, asked.out_dtype, transposed, scaled=True)
    granularity, of_lhs, of_rhs = _of_pairs(op, pairs, lhs_scale, rhs_scale, transposed)
    operation, first = records[granularity], pairs[0][0]
    sizes = scattered.sizes_of(pairs, axes, plain)
    rows = list(first.shape[:-1])
    options: Any = dataclasses.replace(plain, scales=granularity)
    if axis is not None:
        axis = batches.checked_axis(op, axis, first)
        what = "m" if first.ndim == 2 else f"dimension {axis}"
        checks.check_divisible(op, what, first.shape[axis], devices)
        rows[axis] //= devices
        options = ScatterOptions(**vars(options), axis=axis)
    shape = (*rows, sizes["n"])
    replicated = axes if axis is None else ()
    found = scattered.fitted(op, asked.epilogue, pairs, shape, replicated=replicated)
    options = dataclasses.replace(options, epilogue=found.form)
    reordered = axis is not None and batches.is_reordered(first.shape, axis)
    call = decide(
        operation,
        sizes,
        types_of(first, pairs[1][0], options),
        axes,
        options,
        backend=asked.backend,
        config=asked.config,
        obstacle=_obstacle(transposed, len(pairs[0])),
        copied=first.size * reordered,
    )

    def run(given: Any) -> jax.Array:
        *operands, arrays = given
        if call is None:
            return operation.reference(given, axes, options)
        by_rows = functools.partial(batches.by_parts, axis=axis or 0, parts=devices)
        lhs, rhs, of_lhs, of_rhs = operands
        flat = tuple(
            tuple(batches.as_rows(x) if axis is None else by_rows(x) for x in xs)
            for xs in (lhs, of_lhs)
        )
        moved = _alike((flat[0], rhs, flat[1], of_rhs), axes)
        out = launch(moved, call.with_options(epilogue=None)).reshape(shape)
        return out if found.form is None else found.form.after((out,), arrays)[0]

    return without_derivative(op, run, (*pairs, of_lhs, of_rhs, found.arrays))


def scatter_reference(operands: Any, axes: Axes, options: ScatterOptions) -> jax.Array:
    """`epilogue(reduce_scatter(sum of scaled products))`; the sum is in the result's type."""
    out = collectives.reduce_scatter(_sum(operands, options), axes, axis=options.axis)
    return _finished(out, operands, options)


def reduce_reference(operands: Any, axes: Axes, options: MatmulOptions) -> jax.Array:
    """`epilogue(all_reduce(sum of scaled products))`, likewise."""
    return _finished(collectives.all_reduce(_sum(operands, options), axes), operands, options)


def _sum(operands: Any, options: MatmulOptions) -> jax.Array:
    total = sum_of_scaled_products(
        *operands[:4], options.scales, rhs_transposed=options.rhs_transposed
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
    each = zip(*pairs, _each(op, lhs_scale, pairs[0]), _each(op, rhs_scale, pairs[1]), strict=True)
    found = [
        scales.checked(op, x, [y], of_x, [of_y], rhs_transposed=transposed)
        for x, y, of_x, of_y in each
    ]
    kinds = {kind for kind, _, _ in found}
    if len(kinds) > 1:
        raise ValueError(
            f"{op}: some pairs have scales of blocks and others of rows; give all the same."
        )
    return found[0][0], tuple(x for _, x, _ in found), tuple(y for _, _, (y,) in found)


def _each(op: str, given: Any, operands: tuple) -> tuple:
    """A scale for each operand: of a tuple as many, of a single one its own, of None none."""
    if given is None:
        return (None,) * len(operands)
    if not isinstance(given, tuple | list):
        given = (given,)
    if len(given) != len(operands):
        raise ValueError(
            f"{op}: there are {len(given)} scales for {len(operands)} operands; pass a tuple with"
            " one for each."
        )
    return tuple(given)


def _obstacle(transposed: bool, pairs: int = 1) -> str | None:
    if not transposed:
        return NOT_K_MAJOR
    if pairs > 1:
        return f"{pairs} pairs have scales of their own each, and a kernel takes one pair."
    return None


def _alike(operands: Any, axes: Axes) -> Any:
    leaves, tree = jax.tree.flatten(operands)
    return jax.tree.unflatten(tree, typed_alike(axes, leaves))


# --- Groups of rows -------------------------------------------------------------------------------


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
        op, lhs, [rhs], lhs_scale, [rhs_scale], rhs_transposed=transposed
    )
    options = dataclasses.replace(options, scales=granularity)
    types = types_of(lhs, rhs, options)
    obstacle = _obstacle(transposed)
    call = decide(
        records[granularity],
        sizes,
        types,
        (),
        options,
        backend=backend,
        config=config,
        obstacle=obstacle,
    )

    def run(given: Any) -> jax.Array:
        return grouped_reference(given, (), options) if call is None else launch(given, call)

    return without_derivative(op, run, (lhs, rhs, rows, of_lhs, of_rhs))


def grouped_reference(operands: Any, axes: Axes, options: MatmulOptions) -> jax.Array:
    """`lax.ragged_dot` of the values, or of what was dequantised, with rows of no group zero."""
    del axes
    lhs, rhs, sizes, lhs_scale, rhs_scale = operands
    out = scaled_ragged_matmul(
        lhs,
        rhs,
        grouped_kernel.bounds(sizes, lhs.shape[0])[1],
        lhs_scale,
        rhs_scale,
        options.scales,
        rhs_transposed=options.rhs_transposed,
    )
    return out.astype(options.out_dtype)


# --- Records --------------------------------------------------------------------------------------


def record(kind: scales.Granularity, public: Callable[..., Any], plain: Operation) -> Operation:
    """The record of `public` with scales of a granularity: "row" (one of a tensor too) or "block".

    Tables know it by its own name, such as "all_gather_matmul_fp8_block". `plain` is the record of
    the same operation without scales, which it takes its sizes from.
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
        name=f"{plain.name}_fp8" + "_block" * (kind == "block"),
        public=public,
        reference=references[plain.name],
        forward=None,
        tangent=None,
        backward=_no_backward,
        batched=None,
        layout=None,
        between_nodes=None,
        kernels=(kernels[plain.name],),
        work=functools.partial(_work, plain=plain),
        examples=dataclasses.replace(
            plain.examples,
            operands=functools.partial(_example_operands, plain=plain, kind=kind),
            keywords=dict(rhs_transposed=True),
            named=("lhs_scale", "rhs_scale"),
            scales=kind,
        ),
    )


def _work(problem: Problem, *, plain: Operation) -> Work:
    """As without scales, and with a gathered operand its scales."""
    work = plain.work(problem)
    traffic = work.traffic
    if traffic is None or not traffic.gathers:
        return work
    rows, columns = traffic.shape
    more = scales.SCALE_BYTES * (scales.blocks(columns) if problem.types.scales == "block" else 1)
    return dataclasses.replace(
        work, traffic=dataclasses.replace(traffic, shape=(rows, columns + more))
    )


def _example_operands(
    sizes: Sizes, devices: int, *, plain: Operation, kind: scales.Granularity
) -> tuple[Operand, ...]:
    """lhs, transposed rhs and their scales, of one device."""
    lhs, rhs, *others = plain.examples.operands(sizes, devices)
    (m, k), (*groups, _, n) = lhs.shape, rhs.shape
    shapes = [(m, 1), (*groups, n, 1)]
    if kind == "block":
        shapes = [(m, scales.blocks(k)), (*groups, scales.blocks(n), scales.blocks(k))]
    values = [Operand(shape=shape, dtype=scales.FP8[0]) for shape in ((m, k), (*groups, n, k))]
    return (
        *values,
        *others,
        *(
            Operand(shape=shape, dtype="float32", draw=functools.partial(_drawn, shape=shape))
            for shape in shapes
        ),
    )


def _drawn(key: jax.Array, *, shape: tuple[int, ...]) -> jax.Array:
    """Scales between a half and one."""
    return jax.random.uniform(key, shape, jnp.float32, 0.5, 1)


def _no_backward(call: Call, residuals: Any, bars: Any) -> Any:
    del residuals, bars
    raise NotImplementedError(f"{call.operation.name} has no derivative.")
