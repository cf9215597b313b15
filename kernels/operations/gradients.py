"""Reverse-mode rules of the fused matmuls.

The gather of one is the scatter of the other: the derivative of `all_gather_matmul` is a
`matmul_reduce_scatter` and the other way round, so a backward pass moves no more bytes than the
forward pass of the other operation, plus the gathered operand for the weights' gradient.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from stretto.distributed.axes import make_varying, varying_axes
from stretto.distributed.topology import Split
from stretto.kernels.problem import reference
from stretto.kernels.problem.reference import Epilogue, matmul

type Primitive = Callable[..., Any]
type Matrices = tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True)
class Call:
    """What of a call is known when it is traced; hashable, as `custom_vjp` asks.

    `fused` is the kernel itself, as in `fused.py`; the others are the public operations that its
    derivative is made of, with the backend bound. `gathered`: whether the gathered lhs is a result;
    `axis` is that along which an all-gather matmul gathers it.
    Where the axes span nodes, `split` says how, and `pieces` what `nodes.Config` does.
    """

    axes: tuple[Hashable, ...]
    out_dtype: Any
    config: Any
    fused: Primitive
    all_gather: Primitive
    all_gather_matmul: Primitive
    matmul_reduce_scatter: Primitive
    reduce_scatter: Primitive
    rhs_transposed: bool = False
    axis: int = 0
    gathered: bool = False
    epilogue: Epilogue | None = None
    keep_gathered: bool = False
    interpret: Any = None
    typed: bool = False
    split: Split | None = None
    pieces: int | None = None


@dataclasses.dataclass(frozen=True)
class bound:
    """`operation(*operands, axes, backend=backend)`, hashable and equal where its parts are."""

    operation: Callable[..., jax.Array]
    axes: tuple[Hashable, ...]
    backend: str

    def __call__(self, *operands: Any, **options: Any) -> Any:
        """The operation's result."""
        return self.operation(*operands, self.axes, backend=self.backend, **options)


def vary_alike(axes: tuple[Hashable, ...], *operands: jax.Array) -> list[jax.Array]:
    """The operands, each typed as varying over `axes` and over what any of them varies over.

    The transpose of this cast is the sum that a replicated operand's gradient needs.
    """
    varying = frozenset(axes).union(*map(varying_axes, operands))
    return [make_varying(x, varying) for x in operands]


@dataclasses.dataclass(frozen=True)
class Linear:
    """A linear operation of one array, and its transpose."""

    apply: Primitive
    transpose: Primitive


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def linear(x: jax.Array, call: Linear) -> jax.Array:
    """`call.apply(x)`, with the derivative `call.transpose`."""
    return call.apply(x)


def _linear_forward(x, call):
    return call.apply(x), None


def _linear_backward(call, residuals, out_bar):
    del residuals
    return (call.transpose(out_bar),)


linear.defvjp(_linear_forward, _linear_backward)


def sum_of_replicated(x: jax.Array, *, axes: tuple[Hashable, ...], typed: bool) -> jax.Array:
    """What the derivative of a replicated result is worth on each device.

    Where `shard_map` types its values (`check_vma=True`) it is replicated too, and counts once, as
    it is. Where it does not, each device holds a share of it, and they have to be added up.
    """
    if typed:
        return make_varying(x, axes)
    return reference.all_reduce(x, axes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def all_gather_matmul(lhs: jax.Array, rhs: Matrices, call: Call) -> Any:
    """`call.fused(lhs, rhs, call)`, with the derivative of an all-gather matmul."""
    return call.fused(lhs, rhs, call)


def _all_gather_matmul_forward(lhs, rhs, call):
    # The epilogue's derivative needs the product, so here the product is what the kernel stores,
    # and the epilogue follows as an operation of its own.
    kept = call.gathered or call.keep_gathered
    products, gathered = call.fused(
        lhs, rhs, dataclasses.replace(call, epilogue=None, gathered=kept)
    )
    residuals = lhs, rhs, checkpoint_name(gathered, "gathered") if call.keep_gathered else None
    gathered = gathered if call.gathered else None
    if call.epilogue is None:
        return (products, gathered), (*residuals, None)
    outs = tuple(_apply(call.epilogue, product) for product in products)
    return (outs, gathered), (*residuals, products)


def _all_gather_matmul_backward(call, residuals, out_bars):
    """lhs_bar = reduce_scatter(sum of product_bar @ rhs^T), rhs_bar = gathered^T @ product_bar.

    One reduce-scatter serves all right-hand sides: its kernel adds their products up. `gathered`
    has what the caller made of it besides, which is scattered, too.
    """
    lhs, rhs, gathered, products = residuals
    out_bars, gathered_bar = out_bars
    if products is not None:
        _, pull_back = jax.vjp(
            lambda xs: tuple(_apply(call.epilogue, product) for product in xs), products
        )
        (out_bars,) = pull_back(out_bars)
    product_bars = tuple(x.astype(lhs.dtype) for x in out_bars)
    lhs_bar = _lhs_bar(product_bars, rhs, call)
    if call.gathered:
        lhs_bar += call.reduce_scatter(gathered_bar, axis=call.axis)
    if gathered is None:
        gathered = call.all_gather(lhs, axis=call.axis)
    rhs_bars = tuple(_rhs_bar(gathered, x, call) for x in product_bars)
    return lhs_bar.astype(lhs.dtype), rhs_bars


def _lhs_bar(product_bars: Matrices, rhs: Matrices, call: Call) -> jax.Array:
    """The sum of `product_bar @ rhs^T`, scattered along `call.axis`.

    Scattering is by rows, so along the columns it is that of the transpose, `rhs @ product_bar^T`.
    """
    if call.axis == 0:
        transposed = not call.rhs_transposed
        return call.matmul_reduce_scatter(product_bars, rhs, rhs_transposed=transposed)
    rhs = tuple(x.T for x in rhs) if call.rhs_transposed else rhs
    return call.matmul_reduce_scatter(rhs, product_bars, rhs_transposed=True).T


all_gather_matmul.defvjp(_all_gather_matmul_forward, _all_gather_matmul_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def matmul_reduce_scatter(lhs: Matrices, rhs: Matrices, call: Call) -> jax.Array:
    """`call.fused(lhs, rhs, call)`, with the derivative of a matmul reduce-scatter."""
    return call.fused(lhs, rhs, call)


def _matmul_reduce_scatter_forward(lhs, rhs, call):
    return call.fused(lhs, rhs, call), (lhs, rhs)


def _matmul_reduce_scatter_backward(call, residuals, out_bar):
    """lhs_bar = all_gather(out_bar) @ rhs^T, rhs_bar = lhs^T @ all_gather(out_bar): one gather."""
    lhs, rhs = residuals
    lhs_bars, gathered = call.all_gather_matmul(
        out_bar.astype(lhs[0].dtype),
        rhs,
        rhs_transposed=not call.rhs_transposed,
        return_gathered=True,
    )
    return lhs_bars, tuple(_rhs_bar(x, gathered, call) for x in lhs)


matmul_reduce_scatter.defvjp(_matmul_reduce_scatter_forward, _matmul_reduce_scatter_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def matmul_all_reduce(lhs: Matrices, rhs: Matrices, call: Call) -> jax.Array:
    """`call.fused(lhs, rhs, call)`, with the derivative of a matmul all-reduce."""
    return call.fused(lhs, rhs, call)


def _matmul_all_reduce_backward(call, residuals, out_bar):
    """lhs_bar = out_bar @ rhs^T, rhs_bar = lhs^T @ out_bar."""
    lhs, rhs = residuals
    dtype = lhs[0].dtype
    out_bar = sum_of_replicated(out_bar, axes=call.axes, typed=call.typed).astype(dtype)
    lhs_bars = tuple(matmul(out_bar, x if call.rhs_transposed else x.T).astype(dtype) for x in rhs)
    return lhs_bars, tuple(_rhs_bar(x, out_bar, call) for x in lhs)


matmul_all_reduce.defvjp(_matmul_reduce_scatter_forward, _matmul_all_reduce_backward)


def _rhs_bar(lhs: jax.Array, product_bar: jax.Array, call: Call) -> jax.Array:
    """The derivative by rhs of `lhs @ rhs`, as rhs lies in memory."""
    x, y = (product_bar, lhs) if call.rhs_transposed else (lhs, product_bar)
    return reference.matmul_of_columns(x, y).astype(lhs.dtype)


def _apply(epilogue: Epilogue, product: jax.Array) -> jax.Array:
    return epilogue(product.astype(jnp.float32)).astype(product.dtype)
