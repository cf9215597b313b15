"""The steps of a layer of experts: each by what serves it, or two of them by one kernel."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from stretto.distributed.team import Team
from stretto.kernels.fused import dispatch_matmul, group_activation, matmul_combine
from stretto.kernels.fused.activated import Activated
from stretto.kernels.operation import Axes, Call
from stretto.kernels.operations import experts, routed
from stretto.kernels.operations.expert_rules import CombineOptions, DispatchOptions, other
from stretto.kernels.operations.grouped_matmul import product_of_groups
from stretto.kernels.operations.perform import run, typed_alike
from stretto.kernels.xla import experts as xla


class Operands(NamedTuple):
    """Of a layer, as `mixture_of_experts` has them; `w_in` and `b_in` are tuples.

    Attributes:
      dispatched: the rows of x, where the kernel that made the tables has sent them; else None.
    """

    x: Any
    positions: Any
    group_sizes: Any
    weights: Any
    w_in: Any
    w_out: Any
    b_in: Any
    b_out: Any
    dispatched: Any = None

    def of_no_choice(self, axes: Axes) -> jax.Array:
        """The result, zeros, where no token has a choice; no operand has a cotangent.

        XLA's compiler for CPUs crashes on the cotangents of such steps (jaxlib 0.11.2).
        """
        return typed_alike(axes, [jnp.zeros_like(self.x), *jax.tree.leaves(self)])[0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Of a layer.

    Attributes:
      rows: that each device has room for.
      wire_dtype: of the sums that cross between devices.
      activation: of one array, or of gate and up.
      gated: which of the two.
      matmuls: what the caller asked to serve them.
    """

    rows: int
    wire_dtype: Any
    activation: Callable[..., jax.Array]
    gated: bool
    matmuls: str


@dataclasses.dataclass(frozen=True)
class Layer:
    """The steps of one call, or of one of its derivatives."""

    operands: Operands
    call: Call
    differentiated: bool = False

    def dispatched(self) -> jax.Array:
        """The rows of x, `[rows, d]`."""
        operands, rows = self.operands, self.operands.dispatched
        if rows is None:
            return self.dispatch(operands.x)
        call = self._part(experts.EXPERT_DISPATCH, self._of_dispatch, "dispatch")
        return routed.of_x(experts.EXPERT_COMBINE, (operands.x, operands.positions, rows), call)

    @property
    def _of_dispatch(self) -> DispatchOptions:
        return DispatchOptions(rows=self.call.options.rows)

    def dispatch(self, x: jax.Array) -> jax.Array:
        """`[tokens, d]` -> `[rows, d]`."""
        call = self._part(experts.EXPERT_DISPATCH, self._of_dispatch, "dispatch")
        return run((x, self.operands.positions), call)

    def dispatch_into(
        self, x: jax.Array, rhs: jax.Array, *, rhs_transposed: bool = False
    ) -> tuple[jax.Array, jax.Array]:
        """The dispatched rows, and their product with `rhs`."""
        if not self._dispatches_under_product(x, rhs):
            rows = self.dispatch(x)
            return rows, self.product(rows, rhs, rhs_transposed=rhs_transposed)
        return self._dispatch_matmul(x, rhs, rhs_transposed=rhs_transposed)

    def _dispatches_under_product(self, x: jax.Array, rhs: jax.Array) -> bool:
        """Whether the call asks for it, and such operands are served."""
        config, rows = self.call.config, self.call.options.rows
        return (
            config is not None
            and config.under_product
            and dispatch_matmul.obstacle(x, rhs, rows, config.product.tiles) is None
        )

    def _dispatch_matmul(
        self, x: jax.Array, rhs: jax.Array | Activated, *, rhs_transposed: bool = False
    ) -> tuple[jax.Array, jax.Array]:
        axes, positions = self.call.axes, self.operands.positions
        return dispatch_matmul.dispatch_matmul(
            x,
            xla.sources_of_rows(positions, axes, rows=self.call.options.rows),
            self.operands.group_sizes,
            rhs,
            Team.along(axes),
            config=self.call.config.product,
            rhs_transposed=rhs_transposed,
            interpret=self.call.interpret,
        )

    def combine(self, rows: jax.Array, weights: jax.Array) -> jax.Array:
        """`[rows, d]` -> `[tokens, d]`."""
        options = CombineOptions(wire_dtype=self.call.options.wire_dtype)
        call = self._part(experts.EXPERT_COMBINE, options, "combine")
        return run((rows, weights, self.operands.positions), call)

    def product_combined(
        self,
        lhs: Sequence[jax.Array],
        rhs: Sequence[jax.Array],
        weights: jax.Array,
        *,
        rhs_transposed: bool = False,
    ) -> jax.Array:
        """The sum of the products, as `combine` brings it back."""
        config, options = self.call.config, self.call.options
        dtype, positions = self.operands.x.dtype, self.operands.positions
        width, top_k = self.operands.x.shape[1], positions.shape[1]
        if (
            config is None
            or not config.combine_under_product
            or matmul_combine.obstacle(lhs[0], width, top_k, config.last) is not None
        ):
            products = [
                self.product(x, y, rhs_transposed=rhs_transposed)
                for x, y in zip(lhs, rhs, strict=True)
            ]
            return self.combine(_summed(products).astype(dtype), weights)
        return matmul_combine.matmul_combine(
            lhs,
            rhs,
            self.operands.group_sizes,
            weights,
            positions,
            Team.along(self.call.axes),
            wire_dtype=options.wire_dtype,
            config=config.last,
            rhs_transposed=rhs_transposed,
            interpret=self.call.interpret,
        )

    def _part(self, operation: Any, options: Any, name: str) -> Call:
        call = other(self.call, operation, options)
        given = self.call.config
        return call if given is None else dataclasses.replace(call, config=getattr(given, name))

    def product(self, lhs: jax.Array, rhs: jax.Array, *, rhs_transposed: bool = False) -> jax.Array:
        """Of each row with its expert's matrix; rows of no expert may be undefined (`defined`)."""
        return product_of_groups(
            lhs,
            rhs,
            self.operands.group_sizes,
            rhs_transposed=rhs_transposed,
            zeros=self._has_unused_rows,
            backend=self.call.options.matmuls,
        )

    @property
    def _has_unused_rows(self) -> bool:
        """Whether products hold zeros in rows of no expert."""
        config = self.call.config
        if config is None:
            return True
        return config.unused_rows_of_derivatives if self.differentiated else config.unused_rows

    def defined(self, x: jax.Array) -> jax.Array:
        """`[rows, columns]` with zeros where a row is of no expert.

        XLA's moves read such rows, and multiply them by 0. The kernels' do not, so that products
        which those move need not store them (`Config.unused_rows`): it takes as long as for others.
        """
        if self._has_unused_rows:
            return x
        row = jnp.arange(len(x), dtype=jnp.int32)
        return jnp.where((row < jnp.sum(self.operands.group_sizes))[:, None], x, 0)

    def contracted(self, lhs: jax.Array, bar: jax.Array, rhs: jax.Array) -> jax.Array:
        """`lhs^T @ bar` over the rows of each expert, like `rhs`: its cotangent."""
        _, pull_back = jax.vjp(lambda rhs: self.product(lhs, rhs), rhs)
        return pull_back(bar)[0]

    def expert_of_rows(self) -> jax.Array:
        """The own expert of each row, int32 `[rows]`; the last one for rows of none."""
        ends = jnp.cumsum(self.operands.group_sizes, dtype=jnp.int32)
        rows = jnp.arange(self.call.options.rows, dtype=jnp.int32)
        found = jnp.searchsorted(ends, rows, side="right", method="compare_all")
        return jnp.minimum(found, ends.shape[0] - 1).astype(jnp.int32)

    def first(self) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """The dispatched rows, and their products with w_in, without biases."""
        side, *others = self.operands.w_in
        if self.operands.dispatched is None:
            rows, z = self.dispatch_into(self.operands.x, side)
        else:
            rows = self.dispatched()
            z = self.product(rows, side)
        return rows, (z, *(self.product(rows, other) for other in others))

    def activated(self) -> jax.Array:
        """The activation of the products with w_in, `[rows, f]`, where no one else wants these."""
        if not self.activates_in_product():
            return self.hidden(self.first()[1])
        operands, options, config = self.operands, self.call.options, self.call.config
        x, sides = operands.x, operands.w_in
        how: dict[str, Any] = dict(gated=options.gated, tiles=config.product.tiles)
        activated = Activated.of(sides, operands.b_in, options.activation, **how)
        if operands.dispatched is None and self._dispatches_under_product(x, sides[0]):
            return self._dispatch_matmul(x, activated)[1]
        return group_activation.activated_product(
            self.dispatched(), operands.group_sizes, activated, interpret=self.call.interpret
        )

    def activates_in_product(self) -> bool:
        """Whether the call asks for it, and such operands are served."""
        operands, options, config = self.operands, self.call.options, self.call.config
        if config is None or not config.activation_in_product:
            return False
        if not config.any_activation and not (options.gated and operands.b_in is None):
            return False
        how: dict[str, Any] = dict(gated=options.gated, tiles=config.product.tiles)
        x, sides = operands.x, operands.w_in
        return group_activation.obstacle(x, sides, options.activation, **how) is None

    def hidden(self, zs: tuple[jax.Array, ...]) -> jax.Array:
        """The activation, in float32 `[rows, f]`."""
        wide = [self.defined(z.astype(jnp.float32)) for z in zs]
        if self.operands.b_in is not None:
            expert = self.expert_of_rows()
            wide = [
                z + b.astype(z.dtype)[expert] for z, b in zip(wide, self.operands.b_in, strict=True)
            ]
        if self.call.options.gated and len(wide) == 1:
            wide = jnp.split(wide[0], 2, axis=1)
        return self.call.options.activation(*wide)

    def second(self, hidden: jax.Array) -> jax.Array:
        """The product with w_out, with its bias, combined: `[tokens, d]`."""
        w_out, bias, weights = self.operands.w_out, self.operands.b_out, self.operands.weights
        hidden = hidden.astype(self.operands.x.dtype)
        if bias is None:
            return self.product_combined([hidden], [w_out], weights)
        out = self.product(hidden, w_out)
        out = (out + bias.astype(jnp.float32)[self.expert_of_rows()]).astype(out.dtype)
        return self.combine(out, weights)


def _summed(products: Sequence[jax.Array]) -> jax.Array:
    """In float32."""
    first, *others = products
    if not others:
        return first
    return sum((x.astype(jnp.float32) for x in others), first.astype(jnp.float32))
