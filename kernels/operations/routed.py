"""The dispatch by one kernel that makes the tables as well, one for few tokens and one for many."""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax import lax

from stretto.distributed.devices.axes import axis_size, varying_axes
from stretto.distributed.primitives.linear import linear
from stretto.distributed.team import Team
from stretto.kernels.collectives import counted_dispatch, routed_dispatch
from stretto.kernels.collectives.dispatch import Config
from stretto.kernels.operation import Axes, Call, Operation
from stretto.kernels.operations import expert_rules as rules
from stretto.kernels.operations.perform import perform, run
from stretto.kernels.problem.promotion import by_default_rules
from stretto.kernels.problem.routing import Routing
from stretto.kernels.xla.routing import as_int32


def is_served(
    x: jax.Array,
    expert_index: jax.Array,
    config: Config,
    axes: Axes,
    *,
    num_experts: int,
    rows: int,
) -> bool:
    """Whether the configuration wants it and such operands are served.

    Tables would be typed as x is: not where x varies over axes that the choices do not vary over.
    """
    if not varying_axes(x) <= varying_axes(expert_index) | frozenset(axes):
        return False
    few, many = _served(x, expert_index, config, axes, num_experts, rows)
    return few or many


def _served(
    x: jax.Array, expert_index: jax.Array, config: Config, axes: Axes, num_experts: int, rows: int
) -> tuple[bool, bool]:
    """Whether the kernel of few tokens serves, and that of many."""
    tokens, top_k = expert_index.shape
    sizes = dict(num_experts=num_experts, width=x.shape[1], itemsize=x.dtype.itemsize, rows=rows)
    sizes["num_blocks"] = config.num_blocks
    given = tokens, top_k, axis_size(axes)
    few = config.tables and not routed_dispatch.obstacle(*given, **sizes)
    many = config.counted and not counted_dispatch.obstacle(*given, **sizes)
    return few, many


def dispatch(
    combine: Operation, x: jax.Array, expert_index: jax.Array, call: Call, *, num_experts: int
) -> tuple[jax.Array, Routing]:
    """The rows and the tables; differentiable by x, as the dispatch whose tables are given.

    `combine` is the operation that the derivative needs.
    """
    rows, routing = made(x, expert_index, call, call.config, num_experts=num_experts)
    operands = x, routing.positions, rows
    return perform(operands, call, functools.partial(of_x, combine)), routing


def made(
    x: jax.Array, expert_index: jax.Array, call: Call, config: Config, *, num_experts: int
) -> tuple[jax.Array, Routing]:
    """The rows, whose derivative is left to the caller, and the tables.

    `call` is of an operation whose options have `rows`.
    """

    def by(operands: Any, call: Call) -> tuple[jax.Array, Routing]:
        x, index = operands
        rows, team = call.options.rows, Team.along(call.axes)
        how = dict(num_experts=num_experts, rows=rows, num_blocks=config.num_blocks)
        few, _many = _served(x, index, config, call.axes, num_experts, rows)
        if few:
            return routed_dispatch.dispatch(x, index, team, **how, interpret=call.interpret)
        how.update(slots=config.slots, stores=config.stores)
        return counted_dispatch.dispatch(x, index, team, **how, interpret=call.interpret)

    operands = lax.stop_gradient(x), as_int32(expert_index, num_experts)
    return perform(operands, call, by)


def of_x(combine: Operation, operands: Any, call: Call) -> jax.Array:
    """The rows of (x, positions, rows), as what the dispatch of x to the positions is."""

    @jax.custom_jvp
    def dispatched(x: jax.Array, positions: jax.Array, rows: jax.Array) -> jax.Array:
        del x, positions
        return rows

    @dispatched.defjvp
    def _jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
        positions = primals[1]
        dots = linear(
            lambda positions, dot: run((dot, positions), call),
            by_default_rules(
                lambda positions, bar: rules.dispatch_backward(combine, call, positions, bar)[0]
            ),
            positions,
            tangents[0],
        )
        # By the function again: where derivatives are differentiated, the rows depend on x.
        return dispatched(*primals), dots

    return dispatched(*operands)
