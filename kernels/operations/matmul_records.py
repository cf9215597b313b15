"""The records of the matmuls over a team, made for the public functions that they belong to.

The derivative of a gather is a scatter, and the other way round, so each record takes the other's
public function as well.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from stretto.kernels.fused import all_gather_matmul as all_gather_matmul_kernel
from stretto.kernels.fused import all_gather_matmul_k, all_gather_matmul_n
from stretto.kernels.fused import matmul_all_reduce as matmul_all_reduce_kernel
from stretto.kernels.fused import matmul_reduce_scatter as matmul_reduce_scatter_kernel
from stretto.kernels.nodes import hierarchical_matmuls
from stretto.kernels.operation import BetweenNodes, Examples, Kernel, Operation
from stretto.kernels.operations import (
    batches,
    examples,
    gathered,
    layouts,
    matmul_derivatives,
    scattered,
)
from stretto.kernels.operations.collectives import all_gather, reduce_scatter

type Public = Callable[..., Any]


def of_gathers(all_gather_matmul: Public, matmul_reduce_scatter: Public) -> dict[str, Operation]:
    """The records of `all_gather_matmul`, one for each `gather_axis`."""
    record = functools.partial(_gather, all_gather_matmul, matmul_reduce_scatter)
    between_nodes = BetweenNodes(run=hierarchical_matmuls.all_gather_matmul, divided=("m", "n"))
    return {
        "m": record("m", gathered.OP, all_gather_matmul_kernel.KERNEL, between_nodes),
        "k": record("k", f"{gathered.OP}_k", all_gather_matmul_k.KERNEL),
        "n": record("n", f"{gathered.OP}_n", all_gather_matmul_n.KERNEL),
    }


def _gather(
    all_gather_matmul: Public,
    matmul_reduce_scatter: Public,
    gather_axis: str,
    name: str,
    kernel: Kernel,
    between_nodes: BetweenNodes | None = None,
) -> Operation:
    return Operation(
        name=name,
        public=all_gather_matmul,
        sizes=("m", "k", "n"),
        reference=functools.partial(gathered.reference, gather_axis=gather_axis),
        forward=matmul_derivatives.gather_forward,
        residuals_of=lambda operands: (*operands, None),
        tangent=functools.partial(matmul_derivatives.gather_tangent, reference=gathered.reference),
        backward=functools.partial(
            matmul_derivatives.gather_backward,
            matmul_reduce_scatter=matmul_reduce_scatter,
            all_gather=all_gather,
            reduce_scatter=reduce_scatter,
        ),
        batched=batches.of_gather,
        layout=layouts.of_gather,
        work=functools.partial(gathered.work, gather_axis=gather_axis),
        kernels=(kernel,),
        between_nodes=between_nodes,
        examples=Examples(
            sets=examples.MATMUL_SETS,
            shapes=examples.gathering_matmul,
            operands=functools.partial(gathered.example_operands, gather_axis=gather_axis),
            needs=functools.partial(gathered.example_needs, gather_axis=gather_axis),
            keywords={} if gather_axis == "m" else {"gather_axis": gather_axis},
        ),
    )


def of_reduce_scatter(matmul_reduce_scatter: Public, all_gather_matmul: Public) -> Operation:
    """The record of `matmul_reduce_scatter`."""
    return Operation(
        name="matmul_reduce_scatter",
        public=matmul_reduce_scatter,
        sizes=("m", "k", "n"),
        reference=scattered.reduce_scatter_reference,
        forward=matmul_derivatives.keep_operands,
        residuals_of=lambda operands: operands,
        backward=functools.partial(
            matmul_derivatives.scatter_backward, all_gather_matmul=all_gather_matmul
        ),
        batched=batches.of_scatter,
        layout=layouts.of_scatter,
        work=functools.partial(scattered.work, collective="reduce_scatter"),
        kernels=(matmul_reduce_scatter_kernel.KERNEL,),
        between_nodes=BetweenNodes(
            run=hierarchical_matmuls.matmul_reduce_scatter, divided=("m", "k")
        ),
        examples=Examples(
            sets=examples.MATMUL_SETS,
            shapes=examples.reducing_matmul,
            operands=scattered.example_operands,
            needs=lambda sizes, d: (("m", sizes["m"], d), ("k", sizes["k"], d)),
        ),
    )


def of_all_reduce(matmul_all_reduce: Public) -> Operation:
    """The record of `matmul_all_reduce`, whose derivative needs no other matmul of a team."""
    return Operation(
        name="matmul_all_reduce",
        public=matmul_all_reduce,
        sizes=("m", "k", "n"),
        reference=scattered.all_reduce_reference,
        forward=matmul_derivatives.keep_operands,
        residuals_of=lambda operands: operands,
        backward=matmul_derivatives.reduce_backward,
        batched=batches.of_reduce,
        layout=layouts.of_reduce,
        work=functools.partial(scattered.work, collective="all_reduce"),
        kernels=(matmul_all_reduce_kernel.KERNEL,),
        between_nodes=BetweenNodes(run=hierarchical_matmuls.matmul_all_reduce, divided=("k",)),
        examples=Examples(
            sets=examples.MATMUL_SETS,
            shapes=examples.reducing_matmul,
            operands=scattered.example_operands,
            needs=lambda sizes, d: (("k", sizes["k"], d),),
        ),
    )
