"""Matmuls of few rows: a small kernel that sends, and XLA's matmul, one after the other.

With few rows there is little to send and little to hide it under, and what counts is how soon each
starts. A kernel that only sends is there in some 5 us: it needs no semaphores, which XLA would have
to zero, and few multiprocessors, so that it meets its peers by itself (`handshake`). XLA's own
matmul reads rhs as fast as the memory can.

Sums are those of the fused kernels: products rounded to the result's type, added in float32 in the
order of the devices, rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from stretto.distributed.axes import axis_size
from stretto.distributed.schedule import ceil_div
from stretto.kernels.collectives import fused_collectives
from stretto.kernels.operations.gradients import Call
from stretto.kernels.problem import reference


def all_gather_matmul(
    lhs: jax.Array, rhs: Sequence[jax.Array], call: Call
) -> tuple[tuple[jax.Array, ...], jax.Array | None]:
    """As `fused.all_gather_matmul`."""
    gathered = fused_collectives.all_gather(lhs, axes=call.axes, axis=0, interpret=call.interpret)
    outs = (reference.matmul(gathered, x.T if call.rhs_transposed else x) for x in rhs)
    outs = (out if call.epilogue is None else call.epilogue(out) for out in outs)
    cast = tuple(out.astype(call.out_dtype) for out in outs)
    return cast, gathered if call.gathered else None


def matmul_reduce_scatter(
    lhs: Sequence[jax.Array], rhs: Sequence[jax.Array], call: Call
) -> jax.Array:
    """As `fused.matmul_reduce_scatter`."""
    product = _product(lhs, rhs, call)
    devices = axis_size(call.axes)
    if missing := devices * ceil_div(product.shape[0], devices) - product.shape[0]:
        product = jnp.pad(product, ((0, missing), (0, 0)))
    return fused_collectives.reduce_scatter(
        product, axes=call.axes, axis=0, interpret=call.interpret
    )


def matmul_all_reduce(lhs: Sequence[jax.Array], rhs: Sequence[jax.Array], call: Call) -> jax.Array:
    """As `fused.matmul_all_reduce`."""
    product = _product(lhs, rhs, call)
    return fused_collectives.all_reduce(product, axes=call.axes, interpret=call.interpret)


def _product(lhs: Sequence[jax.Array], rhs: Sequence[jax.Array], call: Call) -> jax.Array:
    return reference.sum_of_products(lhs, rhs, call.rhs_transposed).astype(call.out_dtype)
