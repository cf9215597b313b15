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
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from stretto.kernels.collectives import combine as combine_kernel
from stretto.kernels.collectives import dispatch as dispatch_kernel
from stretto.kernels.fused import dispatch_matmul, matmul_combine
from stretto.kernels.operation import Call, Kernel
from stretto.kernels.operations import expert_rules
from stretto.kernels.operations.mixture_steps import Layer, Operands
from stretto.kernels.problem.problem import Problem
from stretto.kernels.xla import experts as xla


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The configuration of the kernels that move tokens.

    Attributes:
      dispatch, combine: of the two.
      under_product: dispatch under the grouped matmul that takes the rows, where that can serve.
        Slower than two steps on two H200s, as is `combine_under_product`.
      activation_in_product: the activation in that matmul, where that can serve and no derivative
        is wanted, which would need the product. It gets the sums before they are rounded. On two
        H200s it saved a tenth of a layer's forward pass (docs/measure/decisions/experts.md).
      any_activation: also with biases, or of experts that are not gated. That is compiled and
        simulated, and was never run on hardware.
      unused_rows: the products hold zeros in rows of no expert. By default those rows are not
        stored, as the kernels that move tokens do not read them.
      unused_rows_of_derivatives: the same where a derivative is wanted. Without, gradients
        had the same bits on two H200s; that was not timed.
      product: of the kernel that does either, or both.
      combine_under_product: combine under the grouped matmul that makes the rows, likewise.
      last: of the kernel that does so.
    """

    under_product: bool = False
    activation_in_product: bool = True
    any_activation: bool = False
    unused_rows: bool = False
    unused_rows_of_derivatives: bool = True
    combine_under_product: bool = False
    product: dispatch_matmul.Config = dataclasses.field(default_factory=dispatch_matmul.Config)
    last: matmul_combine.Config = dataclasses.field(default_factory=matmul_combine.Config)
    dispatch: dispatch_kernel.Config = dataclasses.field(default_factory=dispatch_kernel.Config)
    combine: combine_kernel.Config = dataclasses.field(default_factory=combine_kernel.Config)

    def check(self, problem: Problem | None = None) -> None:
        """Raises ValueError unless the kernels can be built so."""
        self.dispatch.check(problem)
        self.combine.check(problem)
        if self.under_product or self.activation_in_product:
            self.product.check(problem)
        if self.combine_under_product:
            self.last.check(problem)

    @staticmethod
    def candidates(problem: Problem | None = None) -> Iterator[Config]:
        """The configurations that the tuner tries, likely ones first."""
        yield Config()
        yield Config(activation_in_product=False)
        yield Config(any_activation=True)
        yield Config(unused_rows=True)
        yield Config(unused_rows_of_derivatives=False)
        for product in dispatch_matmul.Config.candidates(problem):
            yield Config(under_product=True, product=product)
        for last in matmul_combine.Config.candidates(problem):
            yield Config(combine_under_product=True, last=last)
            yield Config(under_product=True, combine_under_product=True, last=last)
        for dispatch in dispatch_kernel.Config.candidates(problem):
            yield Config(dispatch=dispatch)
        for combine in list(combine_kernel.Config.candidates(problem))[1:]:
            yield Config(combine=combine)


def apply(operands: Operands, call: Call) -> jax.Array:
    """The layer, differentiable as a composition of its steps."""
    layer = Layer(operands, call)
    return layer.second(layer.activated())


def forward(operands: Operands, call: Call) -> tuple[jax.Array, Any]:
    """The layer; what the derivative needs are the dispatched rows and the first product."""
    layer = Layer(operands, call, differentiated=True)
    rows, zs = layer.first()
    rows = checkpoint_name(rows, "dispatched")
    zs = tuple(checkpoint_name(z, "experts") for z in zs)
    return layer.second(layer.hidden(zs)), (operands, rows, zs)


def tangent(call: Call, residuals: Any, dots: Operands) -> jax.Array:
    """The tangent of the composition; its kernels have derivatives themselves."""
    operands = residuals[0]._replace(dispatched=None)  # The rows' tangent is that of x.
    dots = dots._replace(dispatched=None)
    if call.config is not None:
        plain = dataclasses.replace(
            call.config,
            under_product=False,
            activation_in_product=False,
            unused_rows=call.config.unused_rows_of_derivatives,
            combine_under_product=False,
        )
        call = dataclasses.replace(call, config=plain)
    return jax.jvp(lambda xs: apply(xs, call), (operands,), (dots,))[1]


def backward(call: Call, residuals: Any, bar: jax.Array) -> Operands:
    """The cotangents, by the table above."""
    operands, rows, zs = residuals
    layer = Layer(operands, call, differentiated=True)
    dtype = operands.x.dtype
    dy, g = layer.dispatch_into(bar.astype(dtype), operands.w_out, rhs_transposed=True)
    g = layer.defined(g.astype(jnp.float32))
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
    ones = jnp.ones(operands.positions.shape, jnp.float32)
    b_in, b_out = _bias_bars(layer, z_bars, dy, weight, here)
    return Operands(
        x=layer.product_combined(z_bars, operands.w_in, ones, rhs_transposed=True),
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
        # Their cotangent is in that of x.
        dispatched=None if operands.dispatched is None else jnp.zeros_like(operands.dispatched),
    )


def _bias_bars(
    layer: Layer,
    z_bars: tuple[jax.Array, ...],
    dy: jax.Array,
    weight: jax.Array,
    here: jax.Array,
) -> tuple[Any, Any]:
    """Sums over each expert's rows, by the grouped contraction: in the same order every run."""
    operands, dtype = layer.operands, dy.dtype

    def summed(factor: jax.Array, bar: jax.Array, bias: jax.Array) -> jax.Array:
        like = bias[:, None].astype(dtype)  # It counts along which axes it varies, not its numbers.
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


def _moves(problem: Problem) -> list[tuple[Kernel, Problem]]:
    """The kernels that move tokens, whose times are what a layer's by XLA differs in."""
    t, d, top_k = (problem.sizes[name] for name in ("t", "d", "top_k"))
    there = dict(t=t, d=d, top_k=top_k, num_experts=problem.sizes["num_experts"])
    back = dict(t=t, d=d, top_k=top_k, rows=problem.devices * t * top_k)
    moves = (
        ("expert_dispatch", dispatch_kernel.KERNEL, there),
        ("expert_combine", combine_kernel.KERNEL, back),
    )
    return [
        (kernel, dataclasses.replace(problem, operation=name, sizes=sizes))
        for name, kernel, sizes in moves
    ]


KERNEL = Kernel(
    Config=Config,
    run=apply,
    obstacle=_obstacle,
    default=lambda problem: Config(
        dispatch=dispatch_kernel.default_config(problem),
        combine=combine_kernel.default_config(problem),
    ),
    candidates=Config.candidates,
    untried=True,
    parts=_moves,
)

XLA = dataclasses.replace(expert_rules.XLA, run=apply)
"""The same steps, of which XLA moves the tokens."""
