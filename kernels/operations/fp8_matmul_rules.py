"""The rules of the matmuls of `stretto.fp8`: their products forward, backward and without rounding.

How each operand is quantised, for which product, is in the table of `fp8`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from stretto.distributed.devices.axes import make_varying
from stretto.kernels.operations import fp8_products as products
from stretto.kernels.operations import fp8_weights, matmuls
from stretto.kernels.operations.fp8_products import How, Matrices
from stretto.kernels.operations.straight_through import Rules
from stretto.kernels.xla import collectives
from stretto.kernels.xla.matmul import matmul as wide_matmul

type Pair = tuple[jax.Array, jax.Array]

# --- All-gather matmul ----------------------------------------------------------------------------


def _gather_forward(how: How, operands: tuple[jax.Array, Matrices]) -> tuple[Matrices, Any]:
    (x, ws), recipe = operands, how.recipe
    values = recipe.quantised(x, recipe.act_qtype, -1)
    weights = [fp8_weights.as_quantised(recipe, w) for w in ws]
    outs = products.scaled_gather(how, values, weights, how.out_dtype)
    return outs, products.kept(recipe, x, values)


def _gather_backward(
    how: How, operands: tuple[jax.Array, Matrices], residuals: Any, bars: Matrices
) -> tuple[jax.Array, Matrices]:
    """Weights and gradients of several products are joined: one product makes dx."""
    (_, ws), (kept, like), recipe = operands, residuals, how.recipe
    bar = jnp.concatenate(bars, axis=-1)
    w = jnp.concatenate(ws, axis=1)
    if recipe.bwd_qtype is None:
        bar = bar.astype(kept.dtype)
        dx = matmuls.matmul_reduce_scatter(
            bar,
            w.astype(kept.dtype),
            how.axes,
            rhs_transposed=True,
            axis=how.token_axis,
            backend=how.backend,
        )
    else:
        g = recipe.quantised(bar, recipe.bwd_qtype, -1)
        dx = products.scaled_reduce(how, g, products.as_it_lies(recipe, w), like.dtype)
    gathered = products.gathered(how, kept)
    dw = products.weight_gradient(recipe, gathered, bar)
    starts = [sum(x.shape[1] for x in ws[:i]) for i in range(1, len(ws))]
    parts = jnp.split(dw, starts, axis=1)
    return dx.astype(like.dtype), tuple(x.astype(w.dtype) for x, w in zip(parts, ws, strict=True))


def _gather_wide(how: How, operands: tuple[jax.Array, Matrices]) -> Matrices:
    x, ws = products.unrounded(*operands)
    whole = collectives.all_gather(x, how.axes, axis=how.token_axis)
    return tuple(wide_matmul(whole, w).astype(how.out_dtype) for w in ws)


GATHER = Rules(forward=_gather_forward, backward=_gather_backward, wide=_gather_wide)


# --- Sums over the devices ------------------------------------------------------------------------


def _reduce_forward(how: How, operands: Pair) -> tuple[jax.Array, Any]:
    (x, w), recipe = operands, how.recipe
    values = recipe.quantised(x, recipe.act_qtype, -1)
    out = products.scaled_reduce(how, values, fp8_weights.as_quantised(recipe, w), how.out_dtype)
    return out, products.kept(recipe, x, values)


def _reduce_backward(how: How, operands: Pair, residuals: Any, bar: jax.Array) -> Pair:
    (_, w), (kept, like), recipe = operands, residuals, how.recipe
    if how.axis is None:
        # The cotangent of a replicated sum: without types, each device has a share of it.
        whole = make_varying(bar, how.axes) if how.typed else collectives.all_reduce(bar, how.axes)
        dx = products.times_transposed(recipe, whole, w, like.dtype)
        dw = products.weight_gradient(recipe, products.wide(kept, like.dtype), whole)
        return dx, dw.astype(w.dtype)
    if recipe.bwd_qtype is None:
        dx, gathered = matmuls.all_gather_matmul(
            bar.astype(kept.dtype),
            w.astype(kept.dtype),
            how.axes,
            rhs_transposed=True,
            axis=how.token_axis,
            return_gathered=True,
            backend=how.backend,
        )
    else:
        g = recipe.quantised(bar, recipe.bwd_qtype, -1)
        (dx,) = products.scaled_gather(how, g, [products.as_it_lies(recipe, w)], like.dtype)
        gathered = products.gathered(how, g)
    dw = products.weight_gradient(recipe, products.wide(kept, like.dtype), gathered)
    return dx.astype(like.dtype), dw.astype(w.dtype)


def _reduce_wide(how: How, operands: Pair) -> jax.Array:
    product = _alone_wide(how, operands)
    if how.axis is None:
        return collectives.all_reduce(product, how.axes)
    return collectives.reduce_scatter(product, how.axes, axis=how.axis)


REDUCE = Rules(forward=_reduce_forward, backward=_reduce_backward, wide=_reduce_wide)


# --- One device -----------------------------------------------------------------------------------


def _alone_forward(how: How, operands: Pair) -> tuple[jax.Array, Any]:
    (x, w), recipe = operands, how.recipe
    values = recipe.quantised(x, recipe.act_qtype, -1)
    out = products.product(values, fp8_weights.as_quantised(recipe, w)).astype(how.out_dtype)
    return out, products.kept(recipe, x, values)


def _alone_backward(how: How, operands: Pair, residuals: Any, bar: jax.Array) -> Pair:
    (_, w), (kept, like) = operands, residuals
    dx = products.times_transposed(how.recipe, bar, w, like.dtype)
    dw = products.weight_gradient(how.recipe, products.wide(kept, like.dtype), bar)
    return dx, dw.astype(w.dtype)


def _alone_wide(how: How, operands: Pair) -> jax.Array:
    x, (w,) = products.unrounded(operands[0], operands[1:])
    return wide_matmul(x, w).astype(how.out_dtype)


ALONE = Rules(forward=_alone_forward, backward=_alone_backward, wide=_alone_wide)
