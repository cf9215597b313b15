"""`expert_dispatch` and `expert_combine`: tokens to the devices of their experts, and back."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from stretto.distributed.devices.axes import AxisNames, axis_size, canonical_axes
from stretto.kernels.collectives import combine as combine_kernel
from stretto.kernels.collectives import dispatch as dispatch_kernel
from stretto.kernels.operation import Axes, Call, Examples, Kernel, Operation
from stretto.kernels.operations import expert_examples as examples
from stretto.kernels.operations import expert_layouts as layouts
from stretto.kernels.operations.perform import decide, perform, run
from stretto.kernels.problem import checks
from stretto.kernels.problem.problem import Types
from stretto.kernels.problem.routing import Routing
from stretto.kernels.xla import experts as xla
from stretto.kernels.xla.routing import route

DISPATCH, COMBINE = "expert_dispatch", "expert_combine"
ROWS = 8
"""Of which the rows of a buffer for the worst case are a multiple: `grouped_matmul` copies none."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DispatchOptions:
    """Of a dispatch.

    Attributes:
      rows: that each device has room for.
    """

    rows: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class CombineOptions:
    """Of a combine.

    Attributes:
      wire_dtype: of the sums that cross between devices.
    """

    wire_dtype: Any


def expert_dispatch(
    x: jax.Array,
    expert_index: jax.Array,
    axis_name: AxisNames,
    *,
    num_experts: int,
    capacity: int | None = None,
    config: dispatch_kernel.Config | None = None,
    backend: str = "auto",
) -> tuple[jax.Array, Routing]:
    """Each token to the devices of the experts that it chose, inside `jax.shard_map`.

    | operand | shape per device | type |
    |---|---|---|
    | x | `[tokens, d]` | floating-point |
    | expert_index | `[tokens, top_k]`, of all experts | int32 |
    | rows | `[capacity, d]` | x's |

    The experts lie along the axis in blocks: of D devices, device i has experts `i * e` to
    `(i + 1) * e - 1`, where `e = num_experts / D`. `rows` are those of the own experts, expert by
    expert (`routing.group_sizes`), as `grouped_matmul` takes them; of one expert device by device,
    in the order of tokens and of a token's choices. A token that chose an expert twice has two
    rows. Rows beyond the sum of `group_sizes` hold anything.

    An index of -1 chooses no expert. Neither does one that is out of range; those are counted.
    Differentiable by x.

    Args:
      x: the device's own tokens; the kernel takes bfloat16, float16, float32, and 8 bits
        (float8_e4m3fn, float8_e5m2), whose scales are sent as tokens of their own.
      expert_index: the experts that each token goes to.
      axis_name: mesh axis, or tuple of axes, that the experts lie along.
      num_experts: over all devices.
      capacity: rows that a device has room for. By default enough for every token of every device
        to choose experts of one device only: `D * tokens * top_k`, rounded up. With fewer, the
        entries of one expert and one device of tokens are cut off at a limit, the same for all, the
        largest at which they fit; what room that leaves goes to the first that are cut off, by
        expert and device, one row to each. `routing.dropped` counts what is left out.
      config: of the fused kernel; chosen by default.
      backend: "auto" (the fused kernel where a table of this GPU says that it is faster), "pallas"
        (the fused kernel, or an error), "xla", "simulator" (the fused kernel, simulated).

    Returns:
      (rows, routing): `routing.positions` is what `expert_combine` takes.

    Raises:
      ValueError: operands that do not fit each other, `num_experts` that is no multiple of the
        devices, a capacity below 1, tables of more than 2^31 places, an unknown axis or backend, a
        call outside `shard_map`, or a backend that cannot serve.

    Memory: rows take `capacity * d` elements on each device: by default D * top_k times x. XLA's
    way gathers all tokens besides, D times x.

    Synchronisation: every device of the team must make the call, with as many tokens.
    """
    axes = canonical_axes(axis_name)
    devices = axis_size(axes)
    check_routing(DISPATCH, x, expert_index, num_experts, capacity, devices)
    tokens, top_k = expert_index.shape
    rows = room_for(tokens, top_k, devices, capacity)
    routing = route(expert_index, axes, num_experts=num_experts, rows=rows)
    options = DispatchOptions(rows=rows)
    sizes = dict(t=devices * tokens, d=x.shape[1], top_k=top_k, num_experts=num_experts)
    types = Types(lhs=str(x.dtype), rhs="int32", out=str(x.dtype))
    call = decide(EXPERT_DISPATCH, sizes, types, axes, options, backend=backend, config=config)
    return _served(EXPERT_DISPATCH, (x, routing.positions), axes, options, call), routing


def expert_combine(
    rows: jax.Array,
    weights: jax.Array,
    positions: jax.Array,
    axis_name: AxisNames,
    *,
    wire_dtype: jax.typing.DTypeLike | None = None,
    config: combine_kernel.Config | None = None,
    backend: str = "auto",
) -> jax.Array:
    """`out[t] = sum_j weights[t, j] * rows[where t went by its choice j]`, inside `jax.shard_map`.

    | operand | shape per device | type |
    |---|---|---|
    | rows | `[capacity, d]`, of the own experts | floating-point |
    | weights | `[tokens, top_k]`, of the own tokens | floating-point |
    | positions | `[tokens, top_k]`, `routing.positions` of `expert_dispatch` | int32 |
    | out | `[tokens, d]` | the rows' |

    Products are summed in float32: first over the choices of one device's experts, in their order,
    on that device; then over the devices, in their order. In between a sum is rounded once, to
    `wire_dtype`, and the result once, to the type of the rows. So results have the same bits in
    every run. Choices that went nowhere add nothing. Differentiable by rows and weights.

    Args:
      rows: what the experts made of the rows that were dispatched.
      weights: of each choice; used in float32.
      positions: where each choice went.
      axis_name: as of the dispatch.
      wire_dtype: of the sums that cross between devices, by default the rows'. float32 makes the
        sum exact up to rounding in float32, and twice as many bytes cross.
      config, backend: as for `expert_dispatch`.

    Raises:
      ValueError: operands that do not fit each other, and as for `expert_dispatch`.

    Memory: the kernel holds D times `out` in `wire_dtype`; XLA's way as much twice, and D times
    `out` in float32.

    Synchronisation: every device of the team must make the call, with as many tokens.
    """
    axes = canonical_axes(axis_name)
    check_combine(rows, weights, positions)
    wire = checks.check_out_dtype(COMBINE, wire_dtype, rows.dtype)
    options = CombineOptions(wire_dtype=wire)
    tokens, top_k = positions.shape
    devices = axis_size(axes)
    sizes = dict(t=devices * tokens, d=rows.shape[1], top_k=top_k, rows=devices * rows.shape[0])
    types = Types(lhs=str(rows.dtype), rhs=str(weights.dtype), out=str(rows.dtype))
    call = decide(EXPERT_COMBINE, sizes, types, axes, options, backend=backend, config=config)
    return _served(EXPERT_COMBINE, (rows, weights, positions), axes, options, call)


def check_routing(
    op: str, x: Any, expert_index: Any, num_experts: int, capacity: int | None, devices: int
) -> None:
    """Raises ValueError unless tokens can be sent so."""
    checks.check_array(op, "x", x)
    checks.check_array(op, "expert_index", expert_index)
    if x.ndim != 2 or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(
            f"{op}: x is {x.dtype}{list(x.shape)}; it must be [tokens, d] of floating-point"
            " numbers. Reshape or cast it."
        )
    indices = expert_index.ndim == 2 and expert_index.shape[0] == x.shape[0]
    if not indices or not jnp.issubdtype(expert_index.dtype, jnp.integer):
        raise ValueError(
            f"{op}: expert_index is {expert_index.dtype}{list(expert_index.shape)}; it must be"
            f" int32[{x.shape[0]}, top_k], the experts of each of the {x.shape[0]} tokens of x."
        )
    if num_experts < 1:
        raise ValueError(f"{op}: num_experts={num_experts} must be at least 1.")
    if num_experts % devices:
        raise ValueError(
            f"{op}: num_experts={num_experts} must be a multiple of the {devices} devices, which"
            " have as many each; add experts that nobody chooses."
        )
    if capacity is not None and capacity < 1:
        raise ValueError(f"{op}: capacity={capacity} must be at least 1; None drops nothing.")
    tokens, top_k = expert_index.shape
    rows = room_for(tokens, top_k, devices, capacity)
    places = max(rows * devices, tokens * top_k * (num_experts + 1) // 2)
    if places >= 2**31:
        raise ValueError(
            f"{op}: {tokens} tokens of top_k={top_k} for num_experts={num_experts} on {devices}"
            f" devices need tables of {places} places, and 2^31 is the limit; pass fewer tokens at"
            " once, or a smaller capacity."
        )


def check_combine(rows: Any, weights: Any, positions: Any) -> None:
    """Raises ValueError unless results can be brought back so."""
    for name, x in (("rows", rows), ("weights", weights), ("positions", positions)):
        checks.check_array(COMBINE, name, x)
    if rows.ndim != 2 or not jnp.issubdtype(rows.dtype, jnp.floating):
        raise ValueError(
            f"{COMBINE}: rows is {rows.dtype}{list(rows.shape)}; it must be [capacity, d] of"
            " floating-point numbers."
        )
    if positions.ndim != 2 or positions.dtype != jnp.int32:
        raise ValueError(
            f"{COMBINE}: positions is {positions.dtype}{list(positions.shape)}; it must be"
            " int32[tokens, top_k], routing.positions of expert_dispatch."
        )
    if weights.shape != positions.shape or not jnp.issubdtype(weights.dtype, jnp.floating):
        raise ValueError(
            f"{COMBINE}: weights is {weights.dtype}{list(weights.shape)}; it must be"
            f" floating-point{list(positions.shape)}, a weight for each of positions."
        )


def room_for(tokens: int, top_k: int, devices: int, capacity: int | None) -> int:
    """Rows that each device has room for."""
    if capacity is not None:
        return capacity
    return max(2 * ROWS, -(-devices * tokens * top_k // ROWS) * ROWS)


# --- What serves, and derivatives -----------------------------------------------------------------


def _run_xla(operands: Any, call: Call) -> jax.Array:
    if call.operation is EXPERT_DISPATCH:
        x, positions = operands
        return xla.dispatch(x, positions, call.axes, rows=call.options.rows)
    rows, weights, positions = operands
    wire_dtype = call.options.wire_dtype
    return xla.combine(rows, weights, positions, call.axes, wire_dtype=wire_dtype)


XLA = Kernel(
    Config=type(None),
    run=_run_xla,
    obstacle=lambda problem: None,
    default=lambda problem: None,
    candidates=lambda problem: iter(()),
)
"""XLA's operations, with the derivatives of the kernels: JAX's own of a gather would add up in the
type of the rows, and on GPUs in any order."""


def by_xla(operation: Operation, axes: Axes, options: Any, kernel: Kernel = XLA) -> Call:
    """The call that XLA's operations serve, as `kernel` has them."""
    return Call(
        operation=operation,
        kernel=kernel,
        config=None,
        axes=axes,
        options=options,
        backend="xla",
    )


def _served(
    operation: Operation, operands: Any, axes: Axes, options: Any, call: Call | None
) -> jax.Array:
    return perform(operands, by_xla(operation, axes, options) if call is None else call)


def _reference(operation: str, operands: Any, axes: Axes, options: Any) -> jax.Array:
    record = EXPERT_DISPATCH if operation == DISPATCH else EXPERT_COMBINE
    return perform(operands, by_xla(record, axes, options))


def other(call: Call, operation: Operation, options: Any) -> Call:
    """A call of the other operation, served as this one is."""
    kernel = XLA if call.config is None else operation.kernels[0]
    return dataclasses.replace(
        call,
        operation=operation,
        kernel=kernel,
        config=None if kernel is XLA else kernel.Config(),
        options=options,
    )


def _dispatch_forward(operands: Any, call: Call) -> tuple[jax.Array, jax.Array]:
    return run(operands, call), operands[1]


def _dispatch_tangent(call: Call, positions: jax.Array, dots: Any) -> jax.Array:
    return run((dots[0], positions), call)


def _dispatch_backward(call: Call, positions: jax.Array, bar: jax.Array) -> tuple[Any, None]:
    """Every token gets the sum of its rows' cotangents."""
    ones = jnp.ones(positions.shape, jnp.float32)
    combine = other(call, EXPERT_COMBINE, CombineOptions(wire_dtype=bar.dtype))
    return perform((bar, ones, positions), combine), None


def _combine_forward(operands: Any, call: Call) -> tuple[jax.Array, Any]:
    return run(operands, call), operands


def _combine_tangent(call: Call, residuals: Any, dots: Any) -> jax.Array:
    rows, weights, positions = residuals
    rows_dot, weights_dot, _ = dots
    return run((rows_dot, weights, positions), call) + run((rows, weights_dot, positions), call)


def _combine_backward(call: Call, residuals: Any, bar: jax.Array) -> tuple[Any, Any, None]:
    """rows_bar = weight * bar of the token, weights_bar = row . bar of the token."""
    rows, weights, positions = residuals
    dispatch = other(call, EXPERT_DISPATCH, DispatchOptions(rows=rows.shape[0]))
    bars = perform((bar, positions), dispatch).astype(jnp.float32)
    weight, here = xla.numbers_of_rows(weights, positions, call.axes, rows=rows.shape[0])
    rows_bar = jnp.where(here[:, None], weight[:, None] * bars, 0).astype(rows.dtype)
    products = jnp.where(here, jnp.sum(rows.astype(jnp.float32) * bars, axis=1), 0)
    weights_bar = xla.numbers_of_entries(products, positions, call.axes)
    return rows_bar, weights_bar.astype(weights.dtype), None


EXPERT_DISPATCH = Operation(
    name=DISPATCH,
    public=expert_dispatch,
    sizes=("t", "d", "top_k", "num_experts"),
    reference=functools.partial(_reference, DISPATCH),
    forward=_dispatch_forward,
    tangent=_dispatch_tangent,
    backward=_dispatch_backward,
    layout=layouts.of_dispatch,
    joined=layouts.whole_counts,
    work=examples.dispatched,
    kernels=(dispatch_kernel.KERNEL,),
    examples=Examples(
        sets=examples.SETS,
        shapes=examples.dispatch_shapes,
        operands=examples.dispatch_operands,
        values=examples.DISPATCHES,
        needs=examples.needs,
        passed=("num_experts",),
        defined=examples.routed_rows,
    ),
)
EXPERT_COMBINE = Operation(
    name=COMBINE,
    public=expert_combine,
    sizes=("t", "d", "top_k", "rows"),
    reference=functools.partial(_reference, COMBINE),
    forward=_combine_forward,
    tangent=_combine_tangent,
    backward=_combine_backward,
    layout=layouts.of_combine,
    work=examples.combined,
    kernels=(combine_kernel.KERNEL,),
    examples=Examples(
        sets=examples.SETS,
        shapes=examples.combine_shapes,
        operands=examples.combine_operands,
        needs=examples.needs,
    ),
)
