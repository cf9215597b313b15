"""What `stretto.fp8.mixture_of_experts` computes, and its derivative.

The equations are those of `mixture_rules`. What is quantised, along what, and where:

| product | operands | quantised |
|---|---|---|
| z = rows @ w_in | rows `act_qtype`, along d | tokens, before the dispatch |
| y = h @ w_out | h `act_qtype`, along f | on the device of the expert |
| g = dy @ w_out^T | dy `bwd_qtype`, along d | cotangents of tokens, before the dispatch |
| cotangent of rows = z_bar @ w_in^T | z_bar `bwd_qtype`, along f | on the device of the expert |
| those of w_in, w_out and biases | | no: products in x's type, of dequantised rows |

Weights are quantised in `weight_qtype`. A token's scale, or those of its blocks, is sent as a token of
its own: 4 numbers or more, the 16 bytes that the copy engine takes. Of granularity "tensor", where each
device has one scale for its tokens, every row brings that of its device.
"""  # noqa: E501

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from stretto.distributed.devices.axes import axis_size
from stretto.kernels.operation import Axes
from stretto.kernels.operations import expert_rules, experts, fp8_groups
from stretto.kernels.operations.as_bits import from_bits, to_bits
from stretto.kernels.operations.expert_rules import CombineOptions, DispatchOptions
from stretto.kernels.operations.fp8_products import How, Recipe
from stretto.kernels.operations.mixture_steps import Operands
from stretto.kernels.operations.perform import decide, perform
from stretto.kernels.operations.scaled import without_derivative
from stretto.kernels.problem.problem import Types
from stretto.kernels.problem.promotion import by_default_rules
from stretto.kernels.xla import experts as xla
from stretto.kernels.xla.quantisation import Quantised, dequantise

SCALE_COLUMNS = 4
"""Of float32, 16 bytes: what the copy engine takes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer:
    """What a layer is besides its operands.

    Attributes:
      recipe: how operands are quantised.
      axes: that the experts lie along.
      rows: that each device has room for.
      num_experts: over all devices.
      dtype: of tokens and results.
      wire_dtype: of the sums that cross between devices.
      activation: of one array, or of gate and up.
      gated: which of the two.
      backend: of the operations.
    """

    recipe: Recipe
    axes: Axes
    rows: int
    num_experts: int
    dtype: Any
    wire_dtype: Any
    activation: Callable[..., jax.Array]
    gated: bool
    backend: str

    @property
    def how(self) -> How:
        """Of the grouped products."""
        return How(recipe=self.recipe, out_dtype=self.dtype, backend=self.backend)

    def moved(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        """`[tokens, width]` of any type -> `[rows, width]`; rows of no token hold anything."""
        tokens, top_k = positions.shape
        sizes = dict(
            t=axis_size(self.axes) * tokens,
            d=x.shape[1],
            top_k=top_k,
            num_experts=self.num_experts,
        )
        types = Types(lhs=str(x.dtype), rhs="int32", out=str(x.dtype))
        options = DispatchOptions(rows=self.rows)
        record = experts.EXPERT_DISPATCH
        call = decide(record, sizes, types, self.axes, options, backend=self.backend, config=None)
        return perform((x, positions), call or expert_rules.by_xla(record, self.axes, options))

    def dispatched(self, x: Quantised, positions: jax.Array) -> Quantised:
        """Tokens in 8 bits to the devices of their experts, with their scales."""
        tokens = x.qvalue.shape[0]
        scale = x.scale if x.scale.ndim else jnp.broadcast_to(x.scale, (tokens, 1))
        count = scale.shape[1]
        padded = jnp.pad(scale, ((0, 0), (0, -count % SCALE_COLUMNS)))
        return Quantised(self.moved(x.qvalue, positions), self.moved(padded, positions)[:, :count])

    def combined(self, rows: jax.Array, weights: jax.Array, positions: jax.Array) -> jax.Array:
        """`[rows, d]` -> `[tokens, d]`."""
        return experts.expert_combine(
            rows, weights, positions, self.axes, wire_dtype=self.wire_dtype, backend=self.backend
        )

    def combines_by_kernel(self, operands: Operands) -> bool:
        """Whether `combined` reads the rows of experts alone."""
        rows = jax.ShapeDtypeStruct((self.rows, operands.x.shape[1]), self.dtype)
        options = CombineOptions(wire_dtype=self.wire_dtype)
        given = rows, operands.weights, operands.positions
        call = experts.combine_call(*given, self.axes, options, backend=self.backend)
        return call is not None

    def weight(self, w: Any) -> Quantised:
        """A matrix of each expert, `[e, in, out]` or already as `recipe.weight` has it."""
        return w if isinstance(w, Quantised) else self.recipe.weight(w)

    def times(self, lhs: Quantised, w: Any, operands: Operands, *, zeros: bool = True) -> jax.Array:
        """`lhs @ w` of each row with its expert's matrix; `zeros` in rows of no expert."""
        w, sizes = self.weight(w), operands.group_sizes
        return fp8_groups.times(lhs, w, sizes, self.dtype, self.backend, zeros=zeros)

    def activated(self, rows: Quantised, operands: Operands) -> jax.Array:
        """The activation of the first products, where no one else wants these.

        `[rows, f]`, in the layer's type by the kernel that multiplies, or else in float32.
        """
        sides, found = [self.weight(w) for w in operands.w_in], None
        if operands.b_in is None:
            how: dict[str, Any] = dict(activation=self.activation, gated=self.gated)
            sizes = operands.group_sizes
            found = fp8_groups.activated(rows, sides, sizes, self.dtype, self.backend, **how)
        if found is not None:
            return found
        zs = tuple(self.times(rows, w, operands, zeros=False) for w in sides)
        return self.hidden(zs, operands)

    def expert_of_rows(self, operands: Operands) -> jax.Array:
        """The own expert of each row, int32 `[rows]`; the last one for rows of none."""
        ends = jnp.cumsum(operands.group_sizes, dtype=jnp.int32)
        row = jnp.arange(self.rows, dtype=jnp.int32)
        found = jnp.searchsorted(ends, row, side="right", method="compare_all")
        return jnp.minimum(found, ends.shape[0] - 1).astype(jnp.int32)

    def hidden(self, zs: tuple[jax.Array, ...], operands: Operands) -> jax.Array:
        """The activation of the first products, in float32 `[rows, f]`."""
        wide = [z.astype(jnp.float32) for z in zs]
        if operands.b_in is not None:
            expert = self.expert_of_rows(operands)
            biases = [b.astype(jnp.float32)[expert] for b in operands.b_in]
            wide = [z + b for z, b in zip(wide, biases, strict=True)]
        if self.gated and len(wide) == 1:
            wide = jnp.split(wide[0], 2, axis=1)
        return self.activation(*wide)


def output(layer: Layer, operands: Operands) -> jax.Array:
    """The layer, of which no derivative is wanted: the steps of `forward`, fewer where one serves.

    Products leave out the rows of no expert, which are half of all or more, unless XLA's combine
    reads them.
    """
    recipe = layer.recipe
    tokens = recipe.quantised(operands.x, recipe.act_qtype, -1)
    rows = layer.dispatched(tokens, operands.positions)
    # Rows of no expert may hold anything, and there may be one scale for all rows.
    hidden = fp8_groups.zero_beyond(layer.activated(rows, operands), operands.group_sizes)
    hidden = recipe.quantised(hidden, recipe.act_qtype, -1)
    zeros = operands.b_out is not None or not layer.combines_by_kernel(operands)
    out = layer.times(hidden, operands.w_out, operands, zeros=zeros)
    if operands.b_out is not None:
        bias = operands.b_out.astype(jnp.float32)[layer.expert_of_rows(operands)]
        out = (out + bias).astype(out.dtype)
    return layer.combined(out, operands.weights, operands.positions)


@by_default_rules
def forward(layer: Layer, operands: Operands) -> tuple[jax.Array, Any]:
    """The layer, and what its derivative needs."""
    recipe, positions = layer.recipe, operands.positions
    tokens = recipe.quantised(operands.x, recipe.act_qtype, -1)
    rows = layer.dispatched(tokens, positions)
    saved = checkpoint_name(to_bits(rows), "dispatched")
    rows = from_bits(saved)
    zs = tuple(layer.times(rows, w, operands) for w in operands.w_in)
    zs = tuple(checkpoint_name(z, "experts") for z in zs)
    # Rows of no expert may hold anything, and there may be one scale for all rows.
    hidden = fp8_groups.zero_beyond(layer.hidden(zs, operands), operands.group_sizes)
    out = layer.times(recipe.quantised(hidden, recipe.act_qtype, -1), operands.w_out, operands)
    if operands.b_out is not None:
        bias = operands.b_out.astype(jnp.float32)[layer.expert_of_rows(operands)]
        out = (out + bias).astype(out.dtype)
    kept = None if recipe.bwd_qtype is None else saved
    return layer.combined(out, operands.weights, positions), (operands, kept, zs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def differentiable(layer: Layer, operands: Operands) -> jax.Array:
    """`output`, of weights that are not quantised yet."""
    return output(layer, operands)


@by_default_rules
def _backward(layer: Layer, residuals: Any, bar: jax.Array) -> tuple[Operands]:
    """As `mixture_rules.backward` has it, with rows and cotangents in 8 bits."""
    operands, kept, zs = residuals
    sizes, dtype, weights = operands.group_sizes, layer.dtype, operands.weights

    def times_transposed(rows: Any, w: jax.Array) -> jax.Array:
        product = fp8_groups.times_transposed(layer.how, rows, w, sizes, dtype)
        return product.astype(jnp.float32)

    dy = _cotangent_rows(layer, bar.astype(dtype), operands)
    g = times_transposed(dy, operands.w_out)
    weight, here = xla.numbers_of_rows(weights, operands.positions, layer.axes, rows=layer.rows)
    hidden, pull_back = jax.vjp(lambda zs: layer.hidden(zs, operands), zs)
    (z_bars,) = pull_back(weight[:, None] * g)
    z_bars = tuple(jnp.where(here[:, None], x, 0).astype(dtype) for x in z_bars)
    rows_bar = sum(
        times_transposed(z_bar, w) for z_bar, w in zip(z_bars, operands.w_in, strict=True)
    )
    ones = jnp.ones(operands.positions.shape, jnp.float32)
    dy = _wide(layer, dy, sizes)
    of_entries = jnp.sum(hidden * g, axis=1)
    if operands.b_out is not None:
        bias = operands.b_out.astype(jnp.float32)[layer.expert_of_rows(operands)]
        of_entries += jnp.sum(bias * dy.astype(jnp.float32), axis=1)
    of_entries = xla.numbers_of_entries(
        jnp.where(here, of_entries, 0), operands.positions, layer.axes
    )
    rows = layer.moved(operands.x, operands.positions) if kept is None else from_bits(kept)
    found = _Bars(layer, sizes, here)
    return (
        Operands(
            x=layer.combined(jnp.asarray(rows_bar).astype(dtype), ones, operands.positions),
            positions=None,
            group_sizes=None,
            weights=of_entries.astype(weights.dtype),
            w_in=found.of_weights(_wide(layer, rows, sizes), z_bars, operands.w_in),
            w_out=found.of_weights(weight[:, None] * hidden, (dy,), (operands.w_out,))[0],
            b_in=found.of_biases(jnp.ones_like(weight), z_bars, operands.b_in),
            b_out=found.of_bias(weight, dy, operands.b_out),
        ),
    )


def _once(layer: Layer, residuals: Any, bar: jax.Array) -> tuple[Operands]:
    """`_backward`, which is not differentiated again: nothing would come through the rounding."""
    return without_derivative(
        "fp8.mixture_of_experts",
        lambda given: _backward(layer, *given),
        (residuals, bar),
        instead=SECOND,
    )


SECOND = "for derivatives of derivatives call stretto.mixture_of_experts"

differentiable.defvjp(forward, _once)


def _cotangent_rows(layer: Layer, bar: jax.Array, operands: Operands) -> Any:
    """Cotangents of tokens, on the devices of their experts."""
    recipe, positions = layer.recipe, operands.positions
    if recipe.bwd_qtype is None:
        return layer.moved(bar, positions)
    return layer.dispatched(recipe.quantised(bar, recipe.bwd_qtype, -1), positions)


def _wide(layer: Layer, rows: Any, sizes: jax.Array) -> jax.Array:
    """Rows in the layer's type, those of no expert zero."""
    wide = dequantise(*rows, layer.dtype) if isinstance(rows, Quantised) else rows
    return fp8_groups.zero_beyond(wide, sizes)


@dataclasses.dataclass(frozen=True)
class _Bars:
    """Cotangents that are sums over each expert's rows, by products in the layer's type."""

    layer: Layer
    sizes: jax.Array
    here: jax.Array

    def of_weights(self, lhs: jax.Array, bars: Any, like: Any) -> tuple[jax.Array, ...]:
        """`lhs^T @ bar` of each of `bars`."""
        lhs = jnp.where(self.here[:, None], lhs, 0).astype(self.layer.dtype)
        return tuple(
            fp8_groups.contracted(self.layer.how, lhs, bar, w, self.sizes)
            for bar, w in zip(bars, like, strict=True)
        )

    def of_biases(self, factor: jax.Array, bars: Any, like: Any) -> Any:
        """The sum of `factor * bar` of each of `bars`; None without biases."""
        if like is None:
            return None
        found = self.of_weights(factor[:, None], bars, [bias[:, None] for bias in like])
        return tuple(x[:, 0] for x in found)

    def of_bias(self, factor: jax.Array, bar: jax.Array, like: Any) -> Any:
        """The same of one."""
        return None if like is None else self.of_biases(factor, (bar,), (like,))[0]
