"""`stretto.fp8`: differentiable matmuls that quantise their operands themselves, for training.

`Recipe` says how. Operands come in as they are (weights in float32 or bfloat16 are not touched), are
scaled by their own numbers ("current scaling"), and each product of a step is one of 8 bits:

| product | quantised along | operands |
|---|---|---|
| `out = x @ w` | features in | x `act_qtype`, w `weight_qtype`, a transposed copy |
| `dx = g @ w^T` | features out | g `bwd_qtype`, w `weight_qtype`, as it lies |
| `dw = x^T @ g` | tokens | transposed copies of both; in bfloat16 for "block" and without `bwd_qtype` |

The copies are made by XLA in the passes that quantise. The names `act_qtype`, `weight_qtype` and
`bwd_qtype` are qwix's. float8_e4m3fn forward and float8_e5m2 backward is TransformerEngine's
`Format.HYBRID`; "block" with float8_e4m3fn for all is DeepSeek-V3's recipe.
"""  # noqa: E501

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from stretto.distributed.devices.axes import (
    AxisNames,
    axis_size,
    canonical_axes,
    make_varying,
    varying_axes,
)
from stretto.kernels.operation import Axes
from stretto.kernels.operations import batches, matmuls
from stretto.kernels.operations.perform import typed_alike
from stretto.kernels.problem import checks, scales
from stretto.kernels.xla import collectives
from stretto.kernels.xla.matmul import matmul as wide_matmul
from stretto.kernels.xla.matmul import matmul_of_columns
from stretto.kernels.xla.quantisation import Quantised, dequantise, quantise
from stretto.kernels.xla.scaled_matmul import scaled_matmul

__all__ = [
    "Recipe",
    "all_gather_matmul",
    "matmul",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
]

type Matrices = tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """How the operands of a layer's products are quantised.

    Attributes:
      granularity: of scales, as `stretto.quantise` has it: "tensor", "row", or "block" of 1 x 128
        for activations and gradients and 128 x 128 for weights.
      act_qtype, weight_qtype: types of activations and weights.
      bwd_qtype: type of gradients; None for a backward pass in the operands' own type.
      force_pow_2_scales: scales are powers of two.

    Raises:
      ValueError: an unknown granularity or type.
    """

    granularity: Literal["tensor", "row", "block"] = "row"
    act_qtype: str = "float8_e4m3fn"
    weight_qtype: str = "float8_e4m3fn"
    bwd_qtype: str | None = "float8_e5m2"
    force_pow_2_scales: bool = False

    def __post_init__(self) -> None:
        if self.granularity not in ("tensor", "row", "block"):
            raise ValueError(
                f"granularity={self.granularity!r} is not one of 'tensor', 'row', 'block'."
            )
        for name in ("act_qtype", "weight_qtype", "bwd_qtype"):
            value = getattr(self, name)
            if value not in scales.FP8 and not (name == "bwd_qtype" and value is None):
                raise ValueError(f"{name}={value!r} must be {' or '.join(scales.FP8)}.")

    def quantised(self, x: jax.Array, qtype: str, axis: int, *, weight: bool = False) -> Quantised:
        """`x`, whose contraction is `axis`, in 8 bits."""
        return quantise(
            x,
            self.granularity,
            qtype,
            axis=axis,
            block_scaling_dim=2 if weight else 1,
            force_pow_2_scales=self.force_pow_2_scales,
        )

    def weight(self, w: jax.Array) -> Quantised:
        """`w` `[k, n]` for `x @ w`: transposed, `[n, k]`, as the tensor cores take it."""
        found = self.quantised(w, self.weight_qtype, -2, weight=True)
        return Quantised(found.qvalue.T, found.scale.T)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _How:
    """What a product is besides its operands; `axis` is of x, None for a sum on every device."""

    recipe: Recipe
    out_dtype: Any
    axes: Axes = ()
    axis: int | None = None
    backend: str = "auto"
    typed: bool = False


def all_gather_matmul(
    x: jax.Array,
    w: jax.Array | Sequence[jax.Array],
    axis_name: AxisNames,
    *,
    recipe: Recipe = Recipe(),
    axis: int = 0,
    out_dtype: jax.typing.DTypeLike | None = None,
    backend: str = "auto",
) -> Any:
    """`all_gather(x) @ w` in 8 bits, inside `jax.shard_map`; differentiable in reverse.

    Per device x `[..., k]`, gathered along `axis`, and w `[k, n]`, or several in a tuple; as
    `stretto.all_gather_matmul` has them. Values and scales of x are gathered. The backward pass
    keeps those of the device's own x, and gathers them again.

    Args:
      x: floating-point.
      w: the weights, as the optimiser has them.
      axis_name, axis, backend: as for `stretto.all_gather_matmul`.
      recipe: how operands are quantised.
      out_dtype: of the result; x's by default.

    Raises:
      ValueError: as `stretto.all_gather_matmul`.
    """
    axes, op = canonical_axes(axis_name), "fp8.all_gather_matmul"
    several = isinstance(w, tuple | list)
    sides = checks.as_matrices(op, "w", w)
    for side in sides:
        checks.check_matmul_operands(op, x, side, batches=True, scaled=True)
    axis = batches.checked_axis(op, axis, x)
    how = _how(op, x, recipe, out_dtype, axes=axes, axis=axis, backend=backend)
    x, *sides = typed_alike(axes, [x, *sides])
    outs = _gather(how, x, tuple(sides))
    return outs if several else outs[0]


def matmul_reduce_scatter(
    x: jax.Array,
    w: jax.Array,
    axis_name: AxisNames,
    *,
    recipe: Recipe = Recipe(),
    axis: int = 0,
    out_dtype: jax.typing.DTypeLike | None = None,
    backend: str = "auto",
) -> jax.Array:
    """`reduce_scatter(x @ w)` in 8 bits, inside `jax.shard_map`; differentiable in reverse.

    Per device x `[..., k_shard]` and w `[k_shard, n]`. The products are summed over the devices in
    `out_dtype`, as `stretto.matmul_reduce_scatter` does it. Arguments and errors are those of
    `all_gather_matmul`.
    """
    axes, op = canonical_axes(axis_name), "fp8.matmul_reduce_scatter"
    checks.check_matmul_operands(op, x, w, batches=True, scaled=True)
    axis = batches.checked_axis(op, axis, x)
    checks.check_divisible(op, f"dimension {axis}", x.shape[axis], axis_size(axes))
    how = _how(op, x, recipe, out_dtype, axes=axes, axis=axis, backend=backend)
    return _reduce(how, *typed_alike(axes, [x, w]))


def matmul_all_reduce(
    x: jax.Array,
    w: jax.Array,
    axis_name: AxisNames,
    *,
    recipe: Recipe = Recipe(),
    out_dtype: jax.typing.DTypeLike | None = None,
    backend: str = "auto",
) -> jax.Array:
    """`all_reduce(x @ w)` in 8 bits; arguments are those of `matmul_reduce_scatter`."""
    axes, op = canonical_axes(axis_name), "fp8.matmul_all_reduce"
    checks.check_matmul_operands(op, x, w, batches=True, scaled=True)
    how = _how(op, x, recipe, out_dtype, axes=axes, backend=backend)
    return _reduce(how, *typed_alike(axes, [x, w]))


def matmul(
    x: jax.Array,
    w: jax.Array,
    *,
    recipe: Recipe = Recipe(),
    out_dtype: jax.typing.DTypeLike | None = None,
) -> jax.Array:
    """`x @ w` in 8 bits on one device, by XLA; x `[..., k]`, w `[k, n]`; differentiable in reverse.

    Raises:
      ValueError: operands that do not fit each other.
    """
    op = "fp8.matmul"
    checks.check_matmul_operands(op, x, w, batches=True, scaled=True)
    return _alone(_how(op, x, recipe, out_dtype), *typed_alike((), [x, w]))


def _how(op: str, x: jax.Array, recipe: Recipe, out_dtype: Any, **more: Any) -> _How:
    dtype = checks.check_out_dtype(op, out_dtype, x.dtype)
    return _How(recipe=recipe, out_dtype=dtype, typed=bool(varying_axes(x)), **more)


# --- All-gather matmul ----------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather(how: _How, x: jax.Array, ws: Matrices) -> Matrices:
    return _gather_forward(how, x, ws)[0]


def _gather_forward(how: _How, x: jax.Array, ws: Matrices) -> tuple[Matrices, Any]:
    recipe = how.recipe
    values = recipe.quantised(x, recipe.act_qtype, -1)
    weights = [recipe.weight(w) for w in ws]
    outs = _scaled_gather(how, values, weights, how.out_dtype)
    return outs, (_kept(recipe, x, values), ws)


def _gather_backward(how: _How, residuals: Any, bars: Matrices) -> tuple[jax.Array, Matrices]:
    """Weights and gradients of several products are joined: one product makes dx."""
    (kept, like), ws = residuals
    recipe = how.recipe
    bar = jnp.concatenate(bars, axis=-1)
    w = jnp.concatenate(ws, axis=1)
    if recipe.bwd_qtype is None:
        bar = bar.astype(kept.dtype)
        dx = matmuls.matmul_reduce_scatter(
            bar,
            w.astype(kept.dtype),
            how.axes,
            rhs_transposed=True,
            axis=how.axis,
            backend=how.backend,
        )
    else:
        g = recipe.quantised(bar, recipe.bwd_qtype, -1)
        dx = _scaled_reduce(how, g, _as_it_lies(recipe, w), like.dtype)
    gathered = _gathered(how, kept)
    dw = _weight_gradient(recipe, gathered, bar)
    starts = [sum(x.shape[1] for x in ws[:i]) for i in range(1, len(ws))]
    parts = jnp.split(dw, starts, axis=1)
    return dx.astype(like.dtype), tuple(x.astype(w.dtype) for x, w in zip(parts, ws, strict=True))


_gather.defvjp(_gather_forward, _gather_backward)


# --- Sums over the devices ------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _reduce(how: _How, x: jax.Array, w: jax.Array) -> jax.Array:
    return _reduce_forward(how, x, w)[0]


def _reduce_forward(how: _How, x: jax.Array, w: jax.Array) -> tuple[jax.Array, Any]:
    recipe = how.recipe
    values = recipe.quantised(x, recipe.act_qtype, -1)
    out = _scaled_reduce(how, values, recipe.weight(w), how.out_dtype)
    return out, (_kept(recipe, x, values), w)


def _reduce_backward(how: _How, residuals: Any, bar: jax.Array) -> tuple[jax.Array, jax.Array]:
    (kept, like), w = residuals
    recipe = how.recipe
    if how.axis is None:
        # A replicated sum's: where types do not say so, each device has a share of it.
        whole = make_varying(bar, how.axes) if how.typed else collectives.all_reduce(bar, how.axes)
        dx = _times_transposed(recipe, whole, w, like.dtype)
        return dx, _weight_gradient(recipe, _wide(kept, like.dtype), whole).astype(w.dtype)
    if recipe.bwd_qtype is None:
        dx, gathered = matmuls.all_gather_matmul(
            bar.astype(kept.dtype),
            w.astype(kept.dtype),
            how.axes,
            rhs_transposed=True,
            axis=how.axis,
            return_gathered=True,
            backend=how.backend,
        )
    else:
        g = recipe.quantised(bar, recipe.bwd_qtype, -1)
        (dx,) = _scaled_gather(how, g, [_as_it_lies(recipe, w)], like.dtype)
        gathered = _gathered(how, g)
    dw = _weight_gradient(recipe, _wide(kept, like.dtype), gathered)
    return dx.astype(like.dtype), dw.astype(w.dtype)


_reduce.defvjp(_reduce_forward, _reduce_backward)


# --- One device -----------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _alone(how: _How, x: jax.Array, w: jax.Array) -> jax.Array:
    return _alone_forward(how, x, w)[0]


def _alone_forward(how: _How, x: jax.Array, w: jax.Array) -> tuple[jax.Array, Any]:
    recipe = how.recipe
    values = recipe.quantised(x, recipe.act_qtype, -1)
    out = _product(values, recipe.weight(w)).astype(how.out_dtype)
    return out, (_kept(recipe, x, values), w)


def _alone_backward(how: _How, residuals: Any, bar: jax.Array) -> tuple[jax.Array, jax.Array]:
    (kept, like), w = residuals
    dx = _times_transposed(how.recipe, bar, w, like.dtype)
    dw = _weight_gradient(how.recipe, _wide(kept, like.dtype), bar)
    return dx, dw.astype(w.dtype)


_alone.defvjp(_alone_forward, _alone_backward)


# --- Products -------------------------------------------------------------------------------------


def _scaled_gather(how: _How, lhs: Quantised, rhs: Sequence[Quantised], dtype: Any) -> Matrices:
    return matmuls.all_gather_matmul(
        lhs.qvalue,
        tuple(x.qvalue for x in rhs),
        how.axes,
        out_dtype=dtype,
        rhs_transposed=True,
        axis=how.axis,
        lhs_scale=lhs.scale,
        rhs_scale=tuple(x.scale for x in rhs),
        backend=how.backend,
    )


def _scaled_reduce(how: _How, lhs: Quantised, rhs: Quantised, dtype: Any) -> jax.Array:
    options: dict[str, Any] = dict(
        out_dtype=dtype,
        rhs_transposed=True,
        lhs_scale=lhs.scale,
        rhs_scale=rhs.scale,
        backend=how.backend,
    )
    if how.axis is None:
        return matmuls.matmul_all_reduce(lhs.qvalue, rhs.qvalue, how.axes, **options)
    return matmuls.matmul_reduce_scatter(lhs.qvalue, rhs.qvalue, how.axes, axis=how.axis, **options)


def _product(lhs: Quantised, rhs: Quantised) -> jax.Array:
    """`lhs @ rhs^T` of one device, in float32."""
    kind, of_lhs, (of_rhs,) = scales.checked(
        "fp8", lhs.qvalue, [rhs.qvalue], lhs.scale, [rhs.scale], rhs_transposed=True
    )
    return scaled_matmul(lhs.qvalue, rhs.qvalue, of_lhs, of_rhs, kind, rhs_transposed=True)


def _as_it_lies(recipe: Recipe, w: jax.Array) -> Quantised:
    """`w` `[k, n]` as the transposed right-hand side of `g @ w^T`."""
    return recipe.quantised(w, recipe.weight_qtype, -1, weight=True)


def _times_transposed(recipe: Recipe, bar: jax.Array, w: jax.Array, dtype: Any) -> jax.Array:
    """`bar @ w^T` of one device."""
    if recipe.bwd_qtype is None:
        return wide_matmul(bar.astype(dtype), w.T.astype(dtype)).astype(dtype)
    g = recipe.quantised(bar, recipe.bwd_qtype, -1)
    return _product(g, _as_it_lies(recipe, w)).astype(dtype)


def _weight_gradient(recipe: Recipe, x: jax.Array, bar: jax.Array) -> jax.Array:
    """`x^T @ bar` over all tokens, `[..., k]` and `[..., n]`, in float32."""
    x, bar = batches.as_rows(x), batches.as_rows(bar)
    if recipe.bwd_qtype is None or recipe.granularity == "block":
        # Tokens of both in blocks of 1 x 128 are a product that no main loop has.
        return matmul_of_columns(x, bar.astype(x.dtype)).astype(jnp.float32)
    columns = recipe.quantised(x, recipe.act_qtype, 0), recipe.quantised(bar, recipe.bwd_qtype, 0)
    return _product(*(Quantised(q.qvalue.T, q.scale.T) for q in columns))


# --- What the backward pass keeps -----------------------------------------------------------------


def _kept(recipe: Recipe, x: jax.Array, values: Quantised) -> tuple[Any, jax.Array]:
    """x in 8 bits or, without `bwd_qtype`, as it is; and an empty array of its type."""
    return x if recipe.bwd_qtype is None else values, jnp.zeros((0,), x.dtype)


def _wide(kept: Any, dtype: Any) -> jax.Array:
    return dequantise(*kept, dtype) if isinstance(kept, Quantised) else kept


def _gathered(how: _How, kept: Any) -> jax.Array:
    """All devices' tokens of what was kept, or of a gradient, along `how.axis`; dequantised."""
    gather = functools.partial(
        matmuls.all_gather, axis_name=how.axes, axis=how.axis, backend=how.backend
    )
    if not isinstance(kept, Quantised):
        return gather(kept)
    values = gather(kept.qvalue)
    dtype = jnp.bfloat16 if how.out_dtype != jnp.float32 else jnp.float32
    if kept.scale.ndim == 0:  # One of each device's shard.
        shape = (*kept.qvalue.shape[:-1], 1)
        return dequantise(values, gather(jnp.broadcast_to(kept.scale, shape)), dtype)
    return dequantise(values, gather(kept.scale), dtype)
