"""Matmuls of few rows: a small kernel that sends, and XLA's matmul, one after the other.

With few rows both the transfer and the product are short, so the time to start each
dominates. A kernel that only sends starts in about 5 us: it needs no semaphores, which XLA would
have to zero, and few multiprocessors, so that it starts by counters (`handshake`). XLA's own
matmul reads rhs as fast as the memory can.

Sums are those of the fused kernels: products rounded to the result's type, added in float32 in the
order of the devices, rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from stretto.distributed.devices.axes import axis_size
from stretto.distributed.schedule import ceil_div
from stretto.kernels.collectives import arrays, row_layout
from stretto.kernels.operation import Call
from stretto.kernels.problem.epilogue import with_arrays
from stretto.kernels.problem.problem import Problem
from stretto.kernels.xla.matmul import matmul, sum_of_products

type Pairs = tuple[Sequence[jax.Array], Sequence[jax.Array]]


def all_gather_matmul(operands: Any, call: Call) -> tuple[tuple[jax.Array, ...], jax.Array | None]:
    """As `all_gather_matmul.run`."""
    lhs, rhs, more = with_arrays(operands)
    options = call.options
    gathered = arrays.all_gather(lhs, axes=call.axes, axis=0, interpret=call.interpret)
    outs = tuple(matmul(gathered, x.T if options.rhs_transposed else x) for x in rhs)
    if options.epilogue is not None:
        outs = options.epilogue.results(outs, more)
    cast = tuple(out.astype(options.out_dtype) for out in outs)
    return cast, gathered if options.return_gathered else None


def matmul_reduce_scatter(operands: Pairs, call: Call) -> jax.Array:
    """As `matmul_reduce_scatter.run`."""
    product = _product(operands, call)
    devices = axis_size(call.axes)
    if missing := devices * ceil_div(product.shape[0], devices) - product.shape[0]:
        product = jnp.pad(product, ((0, missing), (0, 0)))
    return arrays.reduce_scatter(product, axes=call.axes, axis=0, interpret=call.interpret)


def matmul_all_reduce(operands: Pairs, call: Call) -> jax.Array:
    """As `matmul_all_reduce.run`."""
    product = _product(operands, call)
    return arrays.all_reduce(product, axes=call.axes, interpret=call.interpret)


def by_gather(config: Any, divided: str = "m") -> Callable[[Problem], Any]:
    """`Kernel.apart` of an all-gather matmul: `config` where a shard is gathered as it is.

    `divided` is the size along which shards are joined.
    """
    return lambda problem: _config_in_rows(config, problem, 1, divided, "k")


def by_scatter(config: Any) -> Callable[[Problem], Any]:
    """The same of a reduce-scatter, of a device's part of the product."""
    return lambda problem: _config_in_rows(config, problem, 1, "m", "n")


def by_sum(config: Any) -> Callable[[Problem], Any]:
    """The same of an all-reduce: small products are added in one part, large ones in several."""

    def found(problem: Problem) -> Any:
        size = problem.sizes["m"] * problem.sizes["n"] * problem.types.out_itemsize
        whole = problem.devices if size <= arrays.ONE_SHOT_BYTES else 1
        return _config_in_rows(config, problem, whole, "m", "n")

    return found


def _config_in_rows(config: Any, problem: Problem, times: int, *names: str) -> Any:
    """`config` if a device's part, `times` as large, of the matrix of these sizes fills rows."""
    divided, other = (problem.sizes[name] for name in names)
    part, rest = divmod(times * divided, problem.devices)
    fits = not rest and row_layout.is_in_rows(part * other, problem.types.lhs)
    return config if fits else None


def _product(operands: Pairs, call: Call) -> jax.Array:
    lhs, rhs, _ = with_arrays(operands)
    return sum_of_products(lhs, rhs, call.options.rhs_transposed).astype(call.options.out_dtype)
