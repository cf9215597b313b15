"""The records of the collectives, made for the public functions that they belong to.

All are linear but for maxima and minima: their derivatives need no residuals, and are other
collectives, whose public functions the records take as well.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

from stretto.kernels.collectives import kernels
from stretto.kernels.collectives.kernels import ExchangeOptions
from stretto.kernels.nodes import hierarchical_collectives
from stretto.kernels.operation import BetweenNodes, Call, Examples, Kernel, Operation
from stretto.kernels.operations import collective_rules as rules
from stretto.kernels.operations import examples
from stretto.kernels.operations.perform import cotangent_of_replicated

type Public = Callable[..., Any]


def _record(name: str, public: Public, *served_by: Kernel, **more: Any) -> Operation:
    return Operation(
        name=name,
        public=public,
        sizes=("m", "n"),
        batched=rules.batched,
        work=functools.partial(rules.work, collective=name),
        kernels=served_by,
        **more,
    )


def of_all_gather(all_gather: Public, reduce_scatter: Public) -> Operation:
    """The record of `all_gather`; its derivative is a `reduce_scatter`."""

    def backward(call: Call, _: None, bar: jax.Array) -> jax.Array:
        backend = rules.backend_of_sums(call.backend, bar)
        return reduce_scatter(bar, call.axes, axis=call.options.axis, backend=backend)

    return _record(
        "all_gather",
        all_gather,
        kernels.ALL_GATHER,
        kernels.ALL_GATHER_BY_HEAP,
        reference=rules.all_gather_reference,
        backward=backward,
        between_nodes=BetweenNodes(run=hierarchical_collectives.all_gather, divided=()),
        examples=Examples(
            sets=examples.COLLECTIVE_SETS,
            shapes=examples.collective,
            operands=functools.partial(rules.operands, sharded=True),
            problem=rules.problem_of_a_share,
            needs=lambda sizes, d: (("m", sizes["m"], d),),
        ),
    )


def of_reduce_scatter(reduce_scatter: Public, all_gather: Public) -> Operation:
    """The record of `reduce_scatter`; its derivative is an `all_gather`."""

    def backward(call: Call, _: None, bar: jax.Array) -> jax.Array:
        return all_gather(bar, call.axes, axis=call.options.axis, backend=call.backend)

    return _record(
        "reduce_scatter",
        reduce_scatter,
        kernels.REDUCE_SCATTER,
        reference=rules.reduce_scatter_reference,
        backward=backward,
        between_nodes=BetweenNodes(run=hierarchical_collectives.reduce_scatter, divided=("m",)),
        examples=Examples(
            sets=examples.COLLECTIVE_SETS,
            shapes=examples.collective,
            operands=rules.operands,
            needs=lambda sizes, d: (("m", sizes["m"], d),),
        ),
    )


def of_all_reduce(all_reduce: Public) -> Operation:
    """The record of `all_reduce`; its result is replicated, and so is the cotangent of that."""

    def backward(call: Call, _: None, bar: jax.Array) -> jax.Array:
        return cotangent_of_replicated(call, bar)

    return _record(
        "all_reduce",
        all_reduce,
        kernels.ALL_REDUCE,
        kernels.ALL_REDUCE_BY_HEAP,
        reference=rules.all_reduce_reference,
        backward=backward,
        between_nodes=BetweenNodes(run=hierarchical_collectives.all_reduce, divided=()),
        examples=Examples(
            sets=examples.COLLECTIVE_SETS, shapes=examples.collective, operands=rules.operands
        ),
    )


def of_all_to_all(all_to_all: Public) -> Operation:
    """The record of `all_to_all`; its derivative is another, with both axes exchanged."""

    def backward(call: Call, _: None, bar: jax.Array) -> jax.Array:
        options: ExchangeOptions = call.options
        return all_to_all(
            bar,
            call.axes,
            split_axis=options.concat_axis,
            concat_axis=options.split_axis,
            backend=call.backend,
        )

    return _record(
        "all_to_all",
        all_to_all,
        kernels.ALL_TO_ALL,
        reference=rules.all_to_all_reference,
        backward=backward,
        examples=Examples(
            sets=examples.COLLECTIVE_SETS,
            shapes=functools.partial(examples.collective, exchanges=True),
            operands=functools.partial(rules.operands, sharded=True),
            problem=rules.problem_of_a_share,
            needs=lambda sizes, d: (("m", sizes["m"], d * d),),
            keywords={"split_axis": 0, "concat_axis": 0},
        ),
    )


def of_extremes(*sums: Operation) -> dict[str, Operation]:
    """The records of maxima and minima, by the names of the `sums`: not linear, and of one node."""
    return {
        operation.name: dataclasses.replace(
            operation,
            forward=rules.extreme_forward,
            backward=rules.extreme_backward,
            between_nodes=None,
        )
        for operation in sums
    }
