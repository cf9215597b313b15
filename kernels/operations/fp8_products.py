"""How `stretto.fp8` quantises the operands of a product, and the products of a backward pass."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from stretto.kernels.operation import Axes
from stretto.kernels.operations import batches, matmuls
from stretto.kernels.operations.collectives import all_gather
from stretto.kernels.problem import scales
from stretto.kernels.xla.matmul import matmul as wide_matmul
from stretto.kernels.xla.matmul import matmul_of_columns
from stretto.kernels.xla.quantisation import Quantised, dequantise, quantise
from stretto.kernels.xla.scaled_matmul import scaled_matmul

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
        """`x` in 8 bits, for a contraction along `axis`."""
        return quantise(
            x,
            self.granularity,
            qtype,
            axis=axis,
            block_scaling_dim=2 if weight else 1,
            force_pow_2_scales=self.force_pow_2_scales,
        )

    def weight(self, w: jax.Array) -> Quantised:
        """`w` for `x @ w`, in 8 bits and transposed, as the tensor cores take it.

        Of `[k, n]` it is `[n, k]`; of a matrix for each group, `[g, k, n]`, it is `[g, n, k]`, with
        scales of each group's own. Where weights do not change, make it once.
        """
        return transposed(of_matrices(self, w, -2))


HYBRID = Recipe()
"""The default of all products."""


def check_recipe(op: str, recipe: Any) -> None:
    """Raises ValueError unless `recipe` is one."""
    if not isinstance(recipe, Recipe):
        raise ValueError(f"{op}: recipe={recipe!r:.60} must be a stretto.fp8.Recipe.")


def of_matrices(recipe: Recipe, w: jax.Array, axis: int) -> Quantised:
    """Weights `[k, n]`, or of groups `[g, k, n]`, with their contraction along `axis`."""
    quantised = functools.partial(
        recipe.quantised, qtype=recipe.weight_qtype, axis=axis, weight=True
    )
    if w.ndim == 2 or recipe.granularity != "tensor":
        return quantised(w)
    found = jax.vmap(quantised)(w)
    return Quantised(found.qvalue, found.scale[:, None, None])


def transposed(x: Quantised) -> Quantised:
    """The same with the last two dimensions exchanged; one scale of a tensor stays as it is."""
    scale = x.scale.mT if x.scale.ndim else x.scale
    return Quantised(x.qvalue.mT, scale)


@dataclasses.dataclass(frozen=True, kw_only=True)
class How:
    """The facts of a product but its operands; `axis` is of x, None for a sum on every device."""

    recipe: Recipe
    out_dtype: Any
    axes: Axes = ()
    axis: int | None = None
    backend: str = "auto"
    typed: bool = False

    @property
    def token_axis(self) -> int:
        """`axis` of a product whose tokens are gathered or scattered."""
        return 0 if self.axis is None else self.axis


def scaled_gather(how: How, lhs: Quantised, rhs: Sequence[Quantised], dtype: Any) -> Matrices:
    """`all_gather(lhs) @ rhs^T` of each of rhs, in `dtype`."""
    return matmuls.all_gather_matmul(
        lhs.qvalue,
        tuple(x.qvalue for x in rhs),
        how.axes,
        out_dtype=dtype,
        rhs_transposed=True,
        axis=how.token_axis,
        lhs_scale=lhs.scale,
        rhs_scale=tuple(x.scale for x in rhs),
        backend=how.backend,
    )


def scaled_reduce(how: How, lhs: Quantised, rhs: Quantised, dtype: Any) -> jax.Array:
    """`lhs @ rhs^T`, scattered or, without `how.axis`, everywhere, in `dtype`."""
    options: dict[str, Any] = dict(
        out_dtype=dtype,
        rhs_transposed=True,
        lhs_scale=lhs.scale,
        rhs_scale=rhs.scale,
        backend=how.backend,
    )
    if how.axis is None:
        return matmuls.matmul_all_reduce(lhs.qvalue, rhs.qvalue, how.axes, **options)
    return matmuls.matmul_reduce_scatter(
        lhs.qvalue, rhs.qvalue, how.axes, axis=how.token_axis, **options
    )


def product(lhs: Quantised, rhs: Quantised) -> jax.Array:
    """`lhs @ rhs^T` of one device, in float32."""
    kind, of_lhs, (of_rhs,) = scales.checked(
        "fp8", lhs.qvalue, [rhs.qvalue], lhs.scale, [rhs.scale], rhs_transposed=True
    )
    return scaled_matmul(lhs.qvalue, rhs.qvalue, of_lhs, of_rhs, kind, rhs_transposed=True)


def unrounded(x: jax.Array, ws: Sequence[jax.Array]) -> tuple[jax.Array, Matrices]:
    """Operands in one type, which is x's unless that has 8 bits itself."""
    dtype = x.dtype if x.dtype.itemsize > 1 else jnp.bfloat16
    return x.astype(dtype), tuple(w.astype(dtype) for w in ws)


def as_it_lies(recipe: Recipe, w: jax.Array) -> Quantised:
    """`w` `[k, n]`, or `[g, k, n]`, as the transposed right-hand side of `g @ w^T`."""
    return of_matrices(recipe, w, -1)


def times_transposed(recipe: Recipe, bar: jax.Array, w: jax.Array, dtype: Any) -> jax.Array:
    """`bar @ w^T` of one device."""
    if recipe.bwd_qtype is None:
        return wide_matmul(bar.astype(dtype), w.T.astype(dtype)).astype(dtype)
    g = recipe.quantised(bar, recipe.bwd_qtype, -1)
    return product(g, as_it_lies(recipe, w)).astype(dtype)


def weight_gradient(recipe: Recipe, x: jax.Array, bar: jax.Array) -> jax.Array:
    """`x^T @ bar` over all tokens, `[..., k]` and `[..., n]`, in float32."""
    x, bar = batches.as_rows(x), batches.as_rows(bar)
    if recipe.bwd_qtype is None or recipe.granularity == "block":
        # No main loop multiplies two operands with blocks of 1 x 128 along tokens.
        return matmul_of_columns(x, bar.astype(x.dtype)).astype(jnp.float32)
    columns = recipe.quantised(x, recipe.act_qtype, 0), recipe.quantised(bar, recipe.bwd_qtype, 0)
    return product(*map(transposed, columns))


# --- What the backward pass keeps -----------------------------------------------------------------


def kept(recipe: Recipe, x: jax.Array, values: Quantised) -> tuple[Any, jax.Array]:
    """x in 8 bits or, without `bwd_qtype`, as it is; and an element of its type.

    Of none XLA for CPUs crashes where `jax.checkpoint` saves it (JAX 0.11.2).
    """
    return x if recipe.bwd_qtype is None else values, jnp.zeros((1,), x.dtype)


def wide(kept: Any, dtype: Any) -> jax.Array:
    """The array that `kept` saved, dequantised to `dtype`."""
    return dequantise(*kept, dtype) if isinstance(kept, Quantised) else kept


def gathered(how: How, kept: Any) -> jax.Array:
    """All devices' tokens of a saved operand or of a gradient, along `how.axis`; dequantised."""
    gather = functools.partial(
        all_gather, axis_name=how.axes, axis=how.token_axis, backend=how.backend
    )
    if not isinstance(kept, Quantised):
        return gather(kept)
    values = gather(kept.qvalue)
    dtype = jnp.bfloat16 if how.out_dtype != jnp.float32 else jnp.float32
    if kept.scale.ndim == 0:  # One of each device's shard.
        shape = (*kept.qvalue.shape[:-1], 1)
        return dequantise(values, gather(jnp.broadcast_to(kept.scale, shape)), dtype)
    return dequantise(values, gather(kept.scale), dtype)
