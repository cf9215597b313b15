"""`expert_dispatch` and `expert_combine`: tokens to the devices of their experts, and back."""

from __future__ import annotations

import functools
from typing import Any

import jax

from stretto.distributed.devices.axes import AxisNames, axis_size, canonical_axes
from stretto.kernels.collectives import combine as combine_kernel
from stretto.kernels.collectives import dispatch as dispatch_kernel
from stretto.kernels.operation import Axes, Call, Examples, Operation
from stretto.kernels.operations import expert_examples as examples
from stretto.kernels.operations import expert_layouts as layouts
from stretto.kernels.operations import expert_rules as rules
from stretto.kernels.operations import routed
from stretto.kernels.operations.expert_checks import (
    COMBINE,
    check_combine,
    check_routing,
)
from stretto.kernels.operations.perform import decide, perform
from stretto.kernels.problem import checks
from stretto.kernels.problem.numpy_arrays import takes_numpy_arrays
from stretto.kernels.problem.problem import Types
from stretto.kernels.problem.promotion import by_default_rules
from stretto.kernels.problem.routing import Routing
from stretto.kernels.xla.routing import route

DISPATCH = "expert_dispatch"


@takes_numpy_arrays
@by_default_rules
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
    """Sends each token to the devices of its chosen experts, inside `jax.shard_map`.

    | operand | shape per device | type |
    |---|---|---|
    | x | `[tokens, d]` | floating-point |
    | expert_index | `[tokens, top_k]`, of all experts | int32 |
    | rows | `[capacity, d]` | x's |

    The experts lie along the axis in blocks: of D devices, device i has experts `i * e` to
    `(i + 1) * e - 1`, where `e = num_experts / D`. A device's `rows` belong to its own experts.
    They are ordered by expert (`routing.group_sizes`), as `grouped_matmul` takes them; within an
    expert by the device of the token, then by token, then by choice. A token that chose an expert
    twice has two rows. Rows beyond the sum of `group_sizes` are undefined.

    An index of -1 chooses no expert. An index out of range chooses none either, and is counted in
    `routing.out_of_range`. Differentiable by x.

    Args:
      x: the device's own tokens; the kernel takes bfloat16, float16, float32, and 8 bits
        (float8_e4m3fn, float8_e5m2), whose scales are sent as tokens of their own.
      expert_index: the experts that each token goes to.
      axis_name: mesh axis, or tuple of axes, that the experts lie along.
      num_experts: over all devices.
      capacity: the number of rows of a device. The default is enough for all tokens of all
        devices to choose experts of one device: `D * tokens * top_k`, rounded up. With a smaller
        capacity rows may be dropped. The rows from one device for one expert form a group. All
        groups are cut off at the same limit, the largest at which they fit. The remaining room goes
        to the first longer groups, by expert and device, one row each. `routing.dropped` counts the
        dropped rows.
      config: of the fused kernel; chosen by default.
      backend: "auto" (the fused kernel where a table of this GPU says that it is faster), "pallas"
        (the fused kernel, or an error), "xla", "simulator" (the fused kernel, simulated).

    Returns:
      (rows, routing): `routing.positions` is what `expert_combine` takes.

    Raises:
      ValueError: operands that do not fit each other, `num_experts` that is no multiple of the
        devices, a capacity below 1, more than 2^31 rows of all devices, an unknown axis or
        backend, a call outside `shard_map`, or a backend that cannot serve.

    Memory: rows take `capacity * d` elements on each device: by default D * top_k times x. XLA's
    implementation also gathers all tokens, D times x.

    Synchronisation: every device of the team must make the call, with the same number of tokens.
    """
    axes = canonical_axes(axis_name)
    devices = axis_size(axes)
    rows = check_routing(DISPATCH, x, expert_index, num_experts, capacity, devices)
    num_experts = int(num_experts)  # Of numpy, too.
    tokens, top_k = expert_index.shape
    options = rules.DispatchOptions(rows=rows)
    sizes = dict(t=devices * tokens, d=x.shape[1], top_k=top_k, num_experts=num_experts)
    types = Types(lhs=str(x.dtype), rhs="int32", out=str(x.dtype))
    call = decide(EXPERT_DISPATCH, sizes, types, axes, options, backend=backend, config=config)
    if call is not None and routed.is_served(
        x, expert_index, call.config, axes, num_experts=num_experts, rows=rows
    ):
        return routed.dispatch(EXPERT_COMBINE, x, expert_index, call, num_experts=num_experts)
    routing = route(expert_index, axes, num_experts=num_experts, rows=rows)
    return _served(EXPERT_DISPATCH, (x, routing.positions), axes, options, call), routing


@takes_numpy_arrays
@by_default_rules
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
    """`out[t] = sum_j weights[t, j] * rows[row of t's choice j]`, inside `jax.shard_map`.

    | operand | shape per device | type |
    |---|---|---|
    | rows | `[capacity, d]`, of the own experts | floating-point |
    | weights | `[tokens, top_k]`, of the own tokens | floating-point |
    | positions | `[tokens, top_k]`, `routing.positions` of `expert_dispatch` | int32 |
    | out | `[tokens, d]` | the rows' |

    Products are summed in float32: first on each device, over the choices of its experts in their
    order; then over the devices in their order. Each device's sum is rounded once, to
    `wire_dtype`, and the result once, to the type of the rows. So results have the same bits in
    every run. Choices without a row add zero. Differentiable by rows and weights.

    Args:
      rows: the experts' results for the dispatched rows.
      weights: of each choice; used in float32.
      positions: the row of each choice.
      axis_name: that of the dispatch.
      wire_dtype: the type of the sums that are sent between devices; by default the rows'. With
        float32 the sum is rounded in float32 only, and twice as many bytes are sent.
      config, backend: as for `expert_dispatch`.

    Raises:
      ValueError: operands that do not fit each other, and as for `expert_dispatch`.

    Memory: the kernel holds D times `out` in `wire_dtype`. XLA's implementation holds twice as
    much, and D times `out` in float32.

    Synchronisation: every device of the team must make the call, with the same number of tokens.
    """
    axes = canonical_axes(axis_name)
    check_combine(rows, weights, positions)
    wire = checks.check_out_dtype(COMBINE, wire_dtype, rows.dtype, "wire_dtype")
    options = rules.CombineOptions(wire_dtype=wire)
    call = combine_call(rows, weights, positions, axes, options, backend=backend, config=config)
    return _served(EXPERT_COMBINE, (rows, weights, positions), axes, options, call)


def combine_call(
    rows: Any,
    weights: Any,
    positions: Any,
    axes: Axes,
    options: rules.CombineOptions,
    *,
    backend: str,
    config: combine_kernel.Config | None = None,
) -> Call | None:
    """The call of the kernel that combines arrays of such shapes and types; None where XLA does."""
    tokens, top_k = positions.shape
    devices = axis_size(axes)
    sizes = dict(t=devices * tokens, d=rows.shape[1], top_k=top_k, rows=devices * rows.shape[0])
    types = Types(lhs=str(rows.dtype), rhs=str(weights.dtype), out=str(rows.dtype))
    return decide(EXPERT_COMBINE, sizes, types, axes, options, backend=backend, config=config)


def _served(
    operation: Operation, operands: Any, axes: Axes, options: Any, call: Call | None
) -> jax.Array:
    return perform(operands, rules.by_xla(operation, axes, options) if call is None else call)


def _reference(name: str, operands: Any, axes: Axes, options: Any) -> jax.Array:
    record = EXPERT_DISPATCH if name == DISPATCH else EXPERT_COMBINE
    return perform(operands, rules.by_xla(record, axes, options))


EXPERT_DISPATCH = Operation(
    name=DISPATCH,
    public=expert_dispatch,
    sizes=("t", "d", "top_k", "num_experts"),
    reference=functools.partial(_reference, DISPATCH),
    forward=rules.dispatch_forward,
    tangent=rules.dispatch_tangent,
    backward=lambda *args: rules.dispatch_backward(EXPERT_COMBINE, *args),
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
    forward=rules.combine_forward,
    tangent=rules.combine_tangent,
    backward=lambda *args: rules.combine_backward(EXPERT_DISPATCH, *args),
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
