"""`mixture_of_experts`: a whole layer, `combine(activation(dispatch(x) @ w_in) @ w_out)`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer

from stretto.distributed.devices.axes import AxisNames, axis_size, canonical_axes
from stretto.kernels.operation import Axes, Call, Examples, Operation
from stretto.kernels.operations import expert_checks, expert_rules, mixture_rules, routed
from stretto.kernels.operations import expert_examples as examples
from stretto.kernels.operations import expert_layouts as layouts
from stretto.kernels.operations.mixture_steps import Operands, Options
from stretto.kernels.operations.perform import decide, perform
from stretto.kernels.problem import activations, checks, epilogues
from stretto.kernels.problem.numpy_arrays import takes_numpy_arrays
from stretto.kernels.problem.problem import Types
from stretto.kernels.problem.promotion import by_default_rules
from stretto.kernels.problem.routing import Routing
from stretto.kernels.xla.routing import route

OP = "mixture_of_experts"
type Matrices = jax.Array | tuple[jax.Array, jax.Array]


@takes_numpy_arrays
@by_default_rules
def mixture_of_experts(
    x: jax.Array,
    expert_index: jax.Array,
    weights: jax.Array,
    w_in: Matrices,
    w_out: jax.Array,
    axis_name: AxisNames,
    *,
    activation: Callable[..., jax.Array] | str | None = None,
    b_in: Matrices | None = None,
    b_out: jax.Array | None = None,
    capacity: int | None = None,
    wire_dtype: jax.typing.DTypeLike | None = None,
    config: mixture_rules.Config | None = None,
    backend: str = "auto",
) -> tuple[jax.Array, Routing]:
    """`out[t] = sum_j weights[t, j] * expert_j(x[t])`, inside `jax.shard_map`; differentiable.

    An expert is `activation(x @ w_in + b_in) @ w_out + b_out`. Of D devices each has
    `e = num_experts / D` experts, in blocks along the axis.

    | operand | shape per device | type |
    |---|---|---|
    | x | `[tokens, d]` | floating-point |
    | expert_index | `[tokens, top_k]`, of all experts; -1 for none | int32 |
    | weights | `[tokens, top_k]`, of each choice | floating-point |
    | w_in | `[e, d, f]`; if gated `[e, d, 2 f]`, gate first, or a pair of `[e, d, f]` | x's |
    | w_out | `[e, f, d]` | x's |
    | b_in, b_out | `[e, f]` (or as w_in, without d), `[e, d]` | floating-point |
    | out | `[tokens, d]` | x's |

    Products are summed in float32 and rounded to x's type once; the activation gets float32. Tokens
    are sent as by `expert_dispatch` and `expert_combine`. If the experts' `f` is split over another
    axis of the mesh (tensor parallelism), `out` is one device's addend: sum it over that axis, and
    pass b_out on one device of that axis only.

    Args:
      x, expert_index, weights: the device's own tokens.
      w_in, w_out: of the device's own experts.
      axis_name: mesh axis, or tuple of axes, that the experts lie along.
      activation: elementwise function of float32 arrays: `activation(z)`, or of gated experts
        `activation(gate, up)`. Or a name: "gelu" (the default), "silu", "relu", "tanh"; of gated
        experts "swiglu" (the default, `silu(gate) * up`), "geglu".
        `ClampedSwiglu` (`stretto.kernels.problem.activations`) is the activation of gpt-oss.
      b_in, b_out: biases; none by default.
      capacity, backend: as of `expert_dispatch`.
      wire_dtype: as of `expert_combine`.
      config: of the kernels that move tokens; chosen by default.

    Returns:
      (out, routing): `routing.tokens_per_expert` serves a load-balancing loss, and
      `routing.dropped` counts the rows that did not fit the capacity.

    Raises:
      ValueError: operands that do not fit each other; an activation that is neither a function nor
        the name of one of such experts; and as for `expert_dispatch`.

    Memory: for R = capacity rows (by default D * tokens * top_k) and w_in's n columns, the forward
    pass keeps `R * d` elements of dispatched rows and `R * n` of the first product for the backward
    pass; `jax.checkpoint` computes them again. The `R * d` of the second product are not kept.

    Synchronisation: every device of the team must make the call, with the same number of tokens.
    """
    axes = canonical_axes(axis_name)
    devices = axis_size(axes)
    sides, biases = _as_tuple(w_in), None if b_in is None else _as_tuple(b_in)
    checks.check_array(OP, "w_out", w_out)
    num_experts = expert_checks.check_num_experts(OP, w_out, devices)
    rows = expert_checks.check_routing(OP, x, expert_index, num_experts, capacity, devices)
    gated = check_matrices(OP, x, weights, expert_index, sides, w_out, biases, b_out)
    tokens, top_k = expert_index.shape
    options = Options(
        rows=rows,
        wire_dtype=checks.check_out_dtype(OP, wire_dtype, x.dtype, "wire_dtype"),
        activation=activations.of_experts(OP, activation, gated=gated),
        gated=gated,
        matmuls=backend,
    )
    columns = sum(side.shape[2] for side in sides)
    sizes = dict(
        t=devices * tokens,
        d=x.shape[1],
        n=columns,
        f=w_out.shape[1],
        top_k=top_k,
        num_experts=num_experts,
    )
    types = Types(lhs=str(x.dtype), rhs="int32", out=str(x.dtype))
    uses_traced = _uses_traced_values(options, rows, sides)
    call = decide(
        MIXTURE_OF_EXPERTS,
        *(sizes, types, axes, options),
        backend=backend,
        config=config,
        obstacle="the activation uses a traced value from outside." if uses_traced else None,
    )
    dispatched, tables = _routed(x, expert_index, axes, rows, num_experts, call)
    routing = Routing(*(checkpoint_name(table, "dispatched") for table in tables))
    operands = Operands(
        *(x, routing.positions, routing.group_sizes, weights, sides, w_out, biases, b_out),
        dispatched=dispatched,
    )
    if 0 in expert_index.shape:
        return operands.of_no_choice(axes), routing
    if uses_traced:  # Its derivative is JAX's, step by step.
        call = expert_rules.by_xla(MIXTURE_OF_EXPERTS, axes, options, mixture_rules.XLA)
        return perform(operands, call, mixture_rules.apply), routing
    if call is None:
        return reference(operands, axes, options), routing
    return perform(operands, call), routing


def _routed(
    x: jax.Array,
    expert_index: jax.Array,
    axes: Axes,
    rows: int,
    num_experts: int,
    call: Call | None,
) -> tuple[Any, Routing]:
    """(rows of x if the kernel that makes the tables sends them, the tables)."""
    if call is not None and not call.config.under_product:
        config = call.config.dispatch
        if routed.is_served(x, expert_index, config, axes, num_experts=num_experts, rows=rows):
            return routed.made(x, expert_index, call, config, num_experts=num_experts)
    return None, route(expert_index, axes, num_experts=num_experts, rows=rows)


def _uses_traced_values(options: Options, rows: int, sides: tuple[Any, ...]) -> bool:
    """Whether the activation does; raises ValueError where it does not map each element."""
    count = 1 + options.gated
    columns = sides[0].shape[2] // (count if len(sides) == 1 else 1)
    struct = jax.ShapeDtypeStruct((rows, columns), jnp.float32)
    name = epilogues.name_of(options.activation)
    try:
        traced = jax.make_jaxpr(options.activation)(*[struct] * count)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{OP}: the activation {name} cannot be applied to {count} float32"
            f" {list(struct.shape)}: {error}"
        ) from error
    shapes = [getattr(x, "shape", None) for x in traced.out_avals]
    if shapes != [struct.shape]:
        found = [list(x or ()) for x in shapes]
        raise ValueError(
            f"{OP}: the activation {name} makes {found} of {list(struct.shape)}; it must be"
            " elementwise."
        )
    if mixing := epilogues.mixing(options.activation, struct.shape, *[jnp.float32] * count):
        raise ValueError(
            f"{OP}: the activation {name} must be elementwise, and {mixing}; it is applied to"
            " pieces of the hidden features."
        )
    return any(isinstance(const, Tracer) for const in epilogues.constants(traced))


def reference(operands: Operands, axes: Axes, options: Options) -> jax.Array:
    """The layer whose tokens XLA moves; its matmuls are `grouped_matmul`'s."""
    return perform(
        operands, expert_rules.by_xla(MIXTURE_OF_EXPERTS, axes, options, mixture_rules.XLA)
    )


def _as_tuple(x: Any) -> tuple[Any, ...]:
    return tuple(x) if isinstance(x, tuple | list) else (x,)


def check_matrices(
    op: str,
    x: Any,
    weights: Any,
    expert_index: Any,
    sides: tuple[Any, ...],
    w_out: Any,
    b_in: tuple | None,
    b_out: Any,
) -> bool:
    """Whether experts are gated; raises ValueError unless the operands make a layer."""
    for name, y in (("weights", weights), *(("w_in", side) for side in sides)):
        checks.check_array(op, name, y)
    if weights.shape != expert_index.shape or not jnp.issubdtype(weights.dtype, jnp.floating):
        raise ValueError(
            f"{op}: weights is {weights.dtype}{list(weights.shape)}; it must be"
            f" floating-point{list(expert_index.shape)}, a weight for each of expert_index."
        )
    if w_out.shape[2] != x.shape[1] or w_out.dtype != x.dtype:
        raise ValueError(
            f"{op}: w_out is {w_out.dtype}{list(w_out.shape)}; it must be {x.dtype}[e, f,"
            f" {x.shape[1]}], with as many columns as x and of its type."
        )
    e, f, d = w_out.shape
    wanted = [(e, d, f)] * 2 if len(sides) == 2 else [(e, d, f), (e, d, 2 * f)]
    fits = all(side.shape in wanted for side in sides) and len(sides) in (1, 2)
    if not fits or any(side.dtype != x.dtype for side in sides):
        found = ", ".join(f"{side.dtype}{list(side.shape)}" for side in sides)
        raise ValueError(
            f"{op}: w_in is {found}; with w_out {list(w_out.shape)} it must be"
            f" {x.dtype}{[e, d, f]}, or of gated experts {[e, d, 2 * f]} or two of {[e, d, f]}."
        )
    wanted = None if b_in is None else [(side.shape[0], side.shape[2]) for side in sides]
    for name, bias, shapes in (("b_in", b_in, wanted), ("b_out", (b_out,), [(e, d)])):
        if bias is None or bias == (None,):
            continue
        for y in bias:
            checks.check_array(op, name, y)
        if [y.shape for y in bias] != shapes:
            raise ValueError(
                f"{op}: {name} has shape {[y.shape for y in bias]}; it must be {shapes}, a number"
                " for each column of each expert."
            )
    return any(side.shape[2] != f for side in sides) or len(sides) == 2


MIXTURE_OF_EXPERTS = Operation(
    name=OP,
    public=mixture_of_experts,
    sizes=("t", "d", "n", "f", "top_k", "num_experts"),
    reference=reference,
    forward=mixture_rules.forward,
    tangent=mixture_rules.tangent,
    backward=mixture_rules.backward,
    layout=layouts.of_layer,
    joined=layouts.whole_layer,
    work=examples.layer,
    kernels=(mixture_rules.KERNEL,),
    examples=Examples(
        sets=examples.SETS,
        shapes=examples.layer_shapes,
        operands=examples.layer_operands,
        values=examples.LAYERS,
        needs=examples.needs,
    ),
)
