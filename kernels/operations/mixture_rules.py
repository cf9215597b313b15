"""The computation of `mixture_of_experts` and its derivative, whatever moves the tokens.

With y = h @ w_out, out = sum of weight * y, and dy the dispatched cotangent of out:

| | |
|---|---|
| g | dy @ w_out^T, without the weight |
| cotangent of a weight | y . dy = h . g: y is not needed |
| cotangent of h | weight * g |
| of w_out | (weight * h)^T @ dy |
| of z = rows @ w_in | the activation's, of weight * g |
| of w_in | rows^T @ z_bar |
| of x | the combined z_bar @ w_in^T, each with a weight of 1 |

So weights are multiplied with `f` numbers a row, in one pass with the activation, and never with `d`.
"""  # noqa: E501

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from stretto.distributed.team import Team
from stretto.kernels.collectives import combine as combine_kernel
from stretto.kernels.collectives import dispatch as dispatch_kernel
from stretto.kernels.fused import dispatch_matmul
from stretto.kernels.operation import Call, Kernel
from stretto.kernels.operations import experts
from stretto.kernels.operations.experts import CombineOptions, DispatchOptions
from stretto.kernels.operations.grouped_matmul import grouped_matmul
from stretto.kernels.operations.perform import run
from stretto.kernels.problem.problem import Problem
from stretto.kernels.xla import experts as xla


class Operands(NamedTuple):
    """Of a layer, as `mixture_of_experts` has them; `w_in` and `b_in` are tuples."""

    x: Any
    positions: Any
    group_sizes: Any
    weights: Any
    w_in: Any
    w_out: Any
    b_in: Any
    b_out: Any


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The configuration of the kernels that move tokens.

    Attributes:
      dispatch, combine: of the two.
      under_product: dispatch under the grouped matmul that takes the rows, where that can serve.
      product: of the kernel that does so.
    """

    under_product: bool = False
    product: dispatch_matmul.Config = dataclasses.field(default_factory=dispatch_matmul.Config)
    dispatch: dispatch_kernel.Config = dataclasses.field(default_factory=dispatch_kernel.Config)
    combine: combine_kernel.Config = dataclasses.field(default_factory=combine_kernel.Config)

    def check(self, problem: Problem | None = None) -> None:
        """Raises ValueError unless the kernels can be built so."""
        self.dispatch.check(problem)
        self.combine.check(problem)
        if self.under_product:
            self.product.check(problem)

    @staticmethod
    def candidates(problem: Problem | None = None) -> Iterator[Config]:
        """The configurations that the tuner tries, likely ones first."""
        for product in dispatch_matmul.Config.candidates(problem):
            yield Config(under_product=True, product=product)
        for dispatch in dispatch_kernel.Config.candidates(problem):
            yield Config(dispatch=dispatch)
        for combine in list(combine_kernel.Config.candidates(problem))[1:]:
            yield Config(combine=combine)


@dataclasses.dataclass(frozen=True)
class _Layer:
    """The steps of one call."""

    operands: Operands
    call: Call

    def dispatch(self, x: jax.Array) -> jax.Array:
        """`[tokens, d]` -> `[rows, d]`."""
        options = DispatchOptions(rows=self.call.options.rows)
        call = self._part(experts.EXPERT_DISPATCH, options, "dispatch")
        return run((x, self.operands.positions), call)

    def dispatch_into(
        self, x: jax.Array, rhs: jax.Array, *, rhs_transposed: bool = False
    ) -> tuple[jax.Array, jax.Array]:
        """The dispatched rows, and their product with `rhs`."""
        config, options, interpret = self.call.config, self.call.options, self.call.interpret
        if (
            config is None
            or not config.under_product
            or dispatch_matmul.obstacle(x, rhs, options.rows, config.product.tiles) is not None
        ):
            rows = self.dispatch(x)
            return rows, self.product(rows, rhs, rhs_transposed=rhs_transposed)
        axes, positions = self.call.axes, self.operands.positions
        return dispatch_matmul.dispatch_matmul(
            x,
            xla.sources_of_rows(positions, axes, rows=options.rows),
            self.operands.group_sizes,
            rhs,
            Team.along(axes),
            config=config.product,
            rhs_transposed=rhs_transposed,
            interpret=interpret,
        )

    def combine(self, rows: jax.Array, weights: jax.Array) -> jax.Array:
        """`[rows, d]` -> `[tokens, d]`."""
        options = CombineOptions(wire_dtype=self.call.options.wire_dtype)
        call = self._part(experts.EXPERT_COMBINE, options, "combine")
        return run((rows, weights, self.operands.positions), call)

    def _part(self, operation: Any, options: Any, name: str) -> Call:
        call = experts.other(self.call, operation, options)
        given = self.call.config
        return call if given is None else dataclasses.replace(call, config=getattr(given, name))

    def product(self, lhs: jax.Array, rhs: jax.Array, *, rhs_transposed: bool = False) -> jax.Array:
        """Of each row with its expert's matrix."""
        return grouped_matmul(
            lhs,
            rhs,
            self.operands.group_sizes,
            rhs_transposed=rhs_transposed,
            backend=self.call.options.matmuls,
        )

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
        rows, z = self.dispatch_into(self.operands.x, side)
        return rows, (z, *(self.product(rows, other) for other in others))

    def hidden(self, zs: tuple[jax.Array, ...]) -> jax.Array:
        """The activation, in float32 `[rows, f]`."""
        wide = [z.astype(jnp.float32) for z in zs]
        if self.operands.b_in is not None:
            expert = self.expert_of_rows()
            wide = [
                z + b.astype(z.dtype)[expert] for z, b in zip(wide, self.operands.b_in, strict=True)
            ]
        if self.call.options.gated and len(wide) == 1:
            wide = jnp.split(wide[0], 2, axis=1)
        return self.call.options.activation(*wide)

    def second(self, hidden: jax.Array) -> jax.Array:
        """The product with w_out, with its bias."""
        out = self.product(hidden.astype(self.operands.x.dtype), self.operands.w_out)
        bias = self.operands.b_out
        if bias is None:
            return out
        return (out + bias.astype(jnp.float32)[self.expert_of_rows()]).astype(out.dtype)


def apply(operands: Operands, call: Call) -> jax.Array:
    """The layer, differentiable as a composition of its steps."""
    layer = _Layer(operands, call)
    _, zs = layer.first()
    return layer.combine(layer.second(layer.hidden(zs)), operands.weights)


def forward(operands: Operands, call: Call) -> tuple[jax.Array, Any]:
    """The layer; what the derivative needs are the dispatched rows and the first product."""
    layer = _Layer(operands, call)
    rows, zs = layer.first()
    rows = checkpoint_name(rows, "dispatched")
    zs = tuple(checkpoint_name(z, "experts") for z in zs)
    out = layer.combine(layer.second(layer.hidden(zs)), operands.weights)
    return out, (operands, rows, zs)


def tangent(call: Call, residuals: Any, dots: Operands) -> jax.Array:
    """The tangent of the composition; its kernels have derivatives themselves."""
    operands, _, _ = residuals
    if call.config is not None:
        plain = dataclasses.replace(call.config, under_product=False)
        call = dataclasses.replace(call, config=plain)
    return jax.jvp(lambda xs: apply(xs, call), (operands,), (dots,))[1]


def backward(call: Call, residuals: Any, bar: jax.Array) -> Operands:
    """The cotangents, by the table above."""
    operands, rows, zs = residuals
    layer = _Layer(operands, call)
    dtype = operands.x.dtype
    dy, g = layer.dispatch_into(bar.astype(dtype), operands.w_out, rhs_transposed=True)
    g = g.astype(jnp.float32)
    weight, here = xla.numbers_of_rows(
        operands.weights, operands.positions, call.axes, rows=call.options.rows
    )
    hidden, pull_back = jax.vjp(layer.hidden, zs)
    column = here[:, None]
    (z_bars,) = pull_back(weight[:, None] * g)
    z_bars = tuple(jnp.where(column, z_bar, 0).astype(dtype) for z_bar in z_bars)
    weighted = jnp.where(column, weight[:, None] * hidden, 0).astype(dtype)
    products = jnp.where(here, jnp.sum(hidden * g, axis=1), 0)
    if operands.b_out is not None:
        bias = operands.b_out.astype(jnp.float32)[layer.expert_of_rows()]
        products += jnp.where(here, jnp.sum(bias * dy.astype(jnp.float32), axis=1), 0)
    weights_bar = xla.numbers_of_entries(products, operands.positions, call.axes)
    rows_bar = sum(
        layer.product(z_bar, side, rhs_transposed=True).astype(jnp.float32)
        for z_bar, side in zip(z_bars, operands.w_in, strict=True)
    )
    ones = jnp.ones(operands.positions.shape, jnp.float32)
    b_in, b_out = _bias_bars(layer, z_bars, dy, weight, here)
    return Operands(
        x=layer.combine(jnp.asarray(rows_bar).astype(dtype), ones),
        positions=None,
        group_sizes=None,
        weights=weights_bar.astype(operands.weights.dtype),
        w_in=tuple(
            layer.contracted(rows, z_bar, side)
            for z_bar, side in zip(z_bars, operands.w_in, strict=True)
        ),
        w_out=layer.contracted(weighted, dy, operands.w_out),
        b_in=b_in,
        b_out=b_out,
    )


def _bias_bars(
    layer: _Layer,
    z_bars: tuple[jax.Array, ...],
    dy: jax.Array,
    weight: jax.Array,
    here: jax.Array,
) -> tuple[Any, Any]:
    """Sums over each expert's rows, by the grouped contraction: in the same order every run."""
    operands, dtype = layer.operands, dy.dtype

    def summed(factor: jax.Array, bar: jax.Array, bias: jax.Array) -> jax.Array:
        like = jnp.zeros((bias.shape[0], 1, bias.shape[1]), dtype)
        return layer.contracted(factor[:, None].astype(dtype), bar, like)[:, 0].astype(bias.dtype)

    b_in = b_out = None
    if operands.b_in is not None:
        ones = jnp.where(here, 1, 0)
        b_in = tuple(
            summed(ones, z_bar, bias) for z_bar, bias in zip(z_bars, operands.b_in, strict=True)
        )
    if operands.b_out is not None:
        b_out = summed(jnp.where(here, weight, 0), dy, operands.b_out)
    return b_in, b_out


def _obstacle(problem: Problem) -> str | None:
    return dispatch_kernel.KERNEL.obstacle(problem) or combine_kernel.KERNEL.obstacle(problem)


KERNEL = Kernel(
    Config=Config,
    run=apply,
    obstacle=_obstacle,
    default=lambda problem: Config(),
    candidates=Config.candidates,
    untried=True,
)

XLA = dataclasses.replace(experts.XLA, run=apply)
"""The same steps, of which XLA moves the tokens."""
