"""The collectives' kernels as the choice of a backend and a call see them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax

from stretto.distributed import posting
from stretto.kernels.collectives import arrays, by_heap, exchange, row_layout, summation
from stretto.kernels.operation import Call, Kernel
from stretto.kernels.problem.problem import Problem

SUMMED = ("bfloat16", "float16", "float32", "int32")
KIB, MIB = 2**10, 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class AxisOptions:
    """Of a collective along one axis of the array."""

    axis: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class SumOptions:
    """Of what adds up.

    Attributes:
      op: "sum", "max" or "min".
      axis: of the array, along which the result is scattered; None where it is not.
    """

    op: str = "sum"
    axis: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExchangeOptions:
    """Of an all-to-all."""

    split_axis: int
    concat_axis: int


def _moves(problem: Problem) -> str | None:
    return "the array is empty." if 0 in problem.sizes.values() else None


def _adds(problem: Problem) -> str | None:
    if problem.types.lhs not in SUMMED:
        return f"the kernel adds {', '.join(SUMMED)}, not {problem.types.lhs}."
    return _moves(problem)


def _arguments(call: Call) -> dict[str, Any]:
    return dict(axes=call.axes, config=call.config, interpret=call.interpret)


def _all_gather(x: jax.Array, call: Call) -> jax.Array:
    return arrays.all_gather(x, axis=call.options.axis, **_arguments(call))


def _reduce_scatter(x: jax.Array, call: Call) -> jax.Array:
    return arrays.reduce_scatter(x, axis=call.options.axis, op=call.options.op, **_arguments(call))


def _all_reduce(x: jax.Array, call: Call) -> jax.Array:
    return arrays.all_reduce(x, op=call.options.op, **_arguments(call))


def _all_to_all(x: jax.Array, call: Call) -> jax.Array:
    options: ExchangeOptions = call.options
    return arrays.all_to_all(
        x,
        split_axis=options.split_axis,
        concat_axis=options.concat_axis,
        **_arguments(call),
    )


def _copies(parts: Callable[[Problem], int], results: Callable[[int], float]) -> Any:
    """What XLA copies where parts are not made of whole rows: the operand, and the result.

    `parts` is how many the operand has, `results` how many times as large the result is, for a
    number of devices.
    """

    def found(problem: Problem, config: Any) -> int:
        del config
        size, dtype = math.prod(problem.sizes.values()), problem.types.lhs
        if row_layout.is_in_rows(size // parts(problem), dtype):
            return 0
        return int(size * problem.types.itemsize * (1 + results(problem.devices)))

    return found


def _parts_of_all_reduce(problem: Problem) -> int:
    size = math.prod(problem.sizes.values()) * problem.types.itemsize
    return 1 if size <= arrays.ONE_SHOT_BYTES else problem.devices


def _by_heap(obstacle: Callable[[Problem], str | None]) -> Callable[[Problem], str | None]:
    """Where a collective through the heap has one: it serves what the other kernel does."""

    def found(problem: Problem) -> str | None:
        return obstacle(problem) or posting.obstacle(problem.devices, 0)

    return found


# `fused_from` was measured on 4 H100s, beside NCCL; below, only a table chooses a kernel.
ALL_GATHER = Kernel(
    Config=exchange.Config,
    run=_all_gather,
    obstacle=_moves,
    default=lambda problem: exchange.Config(),
    candidates=exchange.Config.candidates,
    fused_from=4 * MIB,
    copies=_copies(lambda problem: 1, lambda devices: devices),
)
ALL_TO_ALL = dataclasses.replace(
    ALL_GATHER,
    run=_all_to_all,
    fused_from=16 * MIB,
    copies=_copies(lambda problem: problem.devices, lambda devices: 1),
)
REDUCE_SCATTER = Kernel(
    Config=summation.Config,
    run=_reduce_scatter,
    obstacle=_adds,
    default=lambda problem: summation.Config(),
    candidates=summation.Config.candidates,
    fused_from=64 * MIB,
    copies=_copies(lambda problem: problem.devices, lambda devices: 1 / devices),
)
ALL_REDUCE = dataclasses.replace(
    REDUCE_SCATTER,
    run=_all_reduce,
    fused_from=16 * MIB,
    copies=_copies(_parts_of_all_reduce, lambda devices: 1),
)


def _copies_to_messages(results: Callable[[int], float]) -> Any:
    """The same of a kernel through the heap, whose rows are whole messages."""

    def found(problem: Problem, config: Any) -> int:
        del config
        size = math.prod(problem.sizes.values()) * problem.types.itemsize
        return int(size * (1 + results(problem.devices))) if size % by_heap.ROW_BYTES else 0

    return found


# A caller's config chooses these, and small sizes: those were timed on 2 H200s.
ALL_GATHER_BY_HEAP = Kernel(
    Config=by_heap.Config,
    run=_all_gather,
    obstacle=_by_heap(_moves),
    default=lambda problem: by_heap.Config(),
    candidates=by_heap.Config.candidates,
    untried=True,
    recorded_to=64 * KIB,
    unrecorded_to=64 * KIB,
    copies=_copies_to_messages(lambda devices: devices),
)
ALL_REDUCE_BY_HEAP = dataclasses.replace(
    ALL_GATHER_BY_HEAP,
    run=_all_reduce,
    obstacle=_by_heap(_adds),
    recorded_to=1 * MIB,
    unrecorded_to=1 * MIB,
    copies=_copies_to_messages(lambda devices: 1),
)
