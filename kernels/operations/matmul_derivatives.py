"""The rules of the fused matmuls' derivatives: fused in reverse, XLA's forward.

The gather of one is the scatter of the other: the derivative of `all_gather_matmul` is a
`matmul_reduce_scatter` and the other way round, so a backward pass moves no more bytes than the
forward pass of the other operation, plus the gathered operand for the weights' gradient. The rules
get those operations as arguments, bound to the backend of the forward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from stretto.distributed.devices.axes import axis_size
from stretto.distributed.private_jax.names import named
from stretto.kernels.fused import row_blocks
from stretto.kernels.operation import Arrays, Call
from stretto.kernels.operations.perform import cotangent_of_replicated, run
from stretto.kernels.xla.matmul import matmul, matmul_of_columns

type Matrices = tuple[jax.Array, ...]
type Public = Callable[..., Any]


def keep_operands(operands: Arrays, call: Call) -> tuple[Arrays, Arrays]:
    """The results; what the derivative needs are the operands."""
    return run(operands, call), operands


def gather_forward(operands: tuple[jax.Array, Matrices], call: Call) -> tuple[Any, Any]:
    """The results of an all-gather matmul without an epilogue, and what its derivative needs."""
    lhs, rhs = operands
    options = call.options
    kept = options.return_gathered or options.keep_gathered
    results: Any = run(operands, call.with_options(return_gathered=kept))
    products, gathered = results
    for_later = named(gathered, "gathered") if options.keep_gathered else None
    gathered = gathered if options.return_gathered else None
    return (products, gathered), (lhs, rhs, for_later)


def gather_tangent(
    call: Call, residuals: Any, dots: tuple[jax.Array, Matrices], *, reference: Public
) -> tuple[Matrices, jax.Array | None]:
    """out_dot = gathered_dot @ rhs + gathered @ rhs_dot."""
    lhs, rhs, _ = residuals
    options = call.options
    gather_axis = "m" if options.axis == 0 else "k"

    def product(operands: tuple[jax.Array, Matrices]) -> Any:
        return reference(operands, call.axes, options, gather_axis=gather_axis)

    _, (out_dots, gathered_dot) = jax.jvp(product, ((lhs, rhs),), (dots,))
    return out_dots, gathered_dot if options.return_gathered else None


def gather_backward(
    call: Call,
    residuals: Any,
    bars: Any,
    *,
    matmul_reduce_scatter: Public,
    all_gather: Public,
    reduce_scatter: Public,
) -> tuple[jax.Array, Matrices]:
    """lhs_bar = reduce_scatter(sum of product_bar @ rhs^T), rhs_bar = gathered^T @ product_bar.

    One reduce-scatter serves all right-hand sides: its kernel adds their products up. `gathered`
    has the cotangent of the returned gathered operand, which is scattered, too.
    """
    lhs, rhs, gathered = residuals
    out_bars, gathered_bar = bars
    options, axes, backend = call.options, call.axes, call.backend
    product_bars = tuple(x.astype(lhs.dtype) for x in out_bars)
    if options.axis == 0:
        batches_of_bars = tuple(in_blocks(x, options.blocks) for x in product_bars)
        lhs_bar = matmul_reduce_scatter(
            batches_of_bars,
            rhs,
            axes,
            axis=batches_of_bars[0].ndim - 2,
            rhs_transposed=not options.rhs_transposed,
            backend=backend,
        ).reshape(lhs.shape)
    else:
        # Scattering is by rows, so along the columns it is that of the transpose.
        plain = tuple(x.T for x in rhs) if options.rhs_transposed else rhs
        lhs_bar = matmul_reduce_scatter(
            plain, product_bars, axes, rhs_transposed=True, backend=backend
        ).T
    if options.return_gathered:
        lhs_bar += reduce_scatter(gathered_bar, axes, axis=options.axis, backend=backend)
    if gathered is None:
        gathered = all_gather(lhs, axes, axis=options.axis, backend=backend)
    if options.blocks > 1:
        gathered = row_blocks.joined(gathered, options.blocks, axis_size(axes))
    rhs_bars = tuple(_rhs_bar(gathered, x, call) for x in product_bars)
    return lhs_bar.astype(lhs.dtype), rhs_bars


def scatter_backward(
    call: Call, residuals: tuple[Matrices, Matrices], bar: jax.Array, *, all_gather_matmul: Public
) -> tuple[Matrices, Matrices]:
    """lhs_bar = all_gather(out_bar) @ rhs^T, rhs_bar = lhs^T @ all_gather(out_bar): one gather."""
    lhs, rhs = residuals
    batch = in_blocks(bar.astype(lhs[0].dtype), call.options.blocks)
    lhs_bars, gathered = all_gather_matmul(
        batch,
        rhs,
        call.axes,
        axis=batch.ndim - 2,
        rhs_transposed=not call.options.rhs_transposed,
        return_gathered=True,
        backend=call.backend,
    )
    gathered = gathered.reshape(-1, gathered.shape[-1])
    lhs_bars = tuple(bar.reshape(x.shape) for bar, x in zip(lhs_bars, lhs, strict=True))
    return lhs_bars, tuple(_rhs_bar(x, gathered, call) for x in lhs)


def reduce_backward(
    call: Call, residuals: tuple[Matrices, Matrices], bar: jax.Array
) -> tuple[Matrices, Matrices]:
    """lhs_bar = out_bar @ rhs^T, rhs_bar = lhs^T @ out_bar."""
    lhs, rhs = residuals
    dtype = lhs[0].dtype
    bar = cotangent_of_replicated(call, bar).astype(dtype)
    transposed = call.options.rhs_transposed
    lhs_bars = tuple(matmul(bar, x if transposed else x.T).astype(dtype) for x in rhs)
    return lhs_bars, tuple(_rhs_bar(x, bar, call) for x in lhs)


def in_blocks(rows: jax.Array, blocks: int) -> jax.Array:
    """`[rows, n]`, or with several blocks the batch `[blocks, rows of each, n]`."""
    return rows if blocks == 1 else rows.reshape(blocks, -1, rows.shape[1])


def _rhs_bar(lhs: jax.Array, product_bar: jax.Array, call: Call) -> jax.Array:
    """The derivative by rhs of `lhs @ rhs`, in the layout of rhs."""
    x, y = (product_bar, lhs) if call.options.rhs_transposed else (lhs, product_bar)
    return matmul_of_columns(x, y).astype(lhs.dtype)
