"""The choice by what was measured: the entries of a tuned table near a call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stretto.kernels.choice import config_data, neighbours, tables
from stretto.kernels.choice.choice import Choice
from stretto.kernels.choice.tables import Entry
from stretto.kernels.operation import Kernel
from stretto.kernels.problem.problem import Problem

MARGIN = 0.03
"""Share by which the fused kernel must be faster at a shape that was not measured."""

SHORT_US, MARGIN_OF_SHORT = 30.0, 0.2
"""Microseconds of XLA's that a short collective takes, and that share of it. The host launches it,
and both times vary between runs by that: on 2 H200s XLA took 15 to 23 at sizes up to 1 MB."""


type Estimate = Callable[[Problem], tuple[float, float]]
"""(fused, XLA) times of a problem in microseconds, by sizes and rates."""


def look_up(
    kernel: Kernel,
    problem: Problem,
    estimate: Estimate | None = None,
    asked: Problem | None = None,
) -> Choice | None:
    """The choice by the table of the problem's GPU; None where the table does not apply.

    That is where no entry is within `REACH`, where the result's elements are of another width than
    the operands' (than bfloat16, of operands in 8 bits with scales), where no near entry's
    configuration fits the kernel any more, and where a single entry, which is not `NEAR`, is all
    that was measured of an `untried` kernel. Times are those of the very shape. Elsewhere several
    entries say by how much the estimate is off; the fused kernel has to win by `MARGIN`, and has
    its default configuration where no entry is `NEAR`.

    Args:
      kernel: what would serve the problem.
      problem: the call.
      estimate: of the fused kernel's time and XLA's; without one the measured ratios are
        interpolated themselves.
      asked: the problem that the kernel serves, where it `stands_for` the other one.
    """
    if problem.types.out_itemsize != problem.types.measured_out_itemsize:
        return None
    fitting = [
        (distance, entry, config)
        for distance, entry in tables.table_for(problem.machine.kind).near(problem)
        if (config := _config_of(entry, kernel, problem)) is not None
        and not _is_copied_more(kernel, config, entry, problem)
    ]
    if not fitting:
        return None
    distance, nearest, config = fitting[0]
    if kernel.untried and len(fitting) == 1 and distance > tables.NEAR:
        return None
    if distance == 0:
        return Choice(
            problem=problem,
            backend="pallas" if nearest.ratio <= 1 else "xla",
            reason=f"the fused kernel was measured to take {_percent(nearest.ratio)} of XLA's time",
            kernel=kernel,
            config=config,
            fused_us=nearest.fused_us,
            xla_us=nearest.xla_us,
        )
    near = [(distance, entry) for distance, entry, _ in fitting]
    ratio = ratio_between(near, problem, estimate)
    is_short = estimate is None and nearest.xla_us < SHORT_US
    margin = MARGIN_OF_SHORT if is_short else MARGIN
    shapes = ", ".join(entry.shape for _, entry in near[: neighbours.COUNT])
    return Choice(
        problem=problem,
        backend="pallas" if ratio <= 1 - margin else "xla",
        reason=f"the fused kernel should take {_percent(ratio)} of XLA's time, by the nearest"
        f" shapes in the table, {shapes}",
        kernel=kernel,
        config=kernel.fitted(config, problem)
        if distance <= tables.NEAR
        else kernel.default(asked or problem),
    )


def _is_copied_more(kernel: Kernel, config: Any, entry: Entry, problem: Problem) -> bool:
    """Whether an entry's operand of a collective was copied for its size, and the problem's is not.

    So were the smallest ones: a part of 256 bytes fills no row.
    """
    if kernel.fused_from is None or kernel.copies(problem, config):
        return False
    return kernel.copies(dataclasses.replace(problem, sizes=entry.sizes), config) > 0


def is_of(entry: Entry, kernel: Kernel, problem: Problem) -> bool:
    """Whether an entry's configuration is one of `kernel`, and fits `problem`."""
    return _config_of(entry, kernel, problem) is not None


def _percent(ratio: float) -> str:
    return f"{100 * ratio:.0f}%"


def ratio_between(
    near: Sequence[tuple[float, Entry]], problem: Problem, estimate: Estimate | None
) -> float:
    """The fused kernel's time over XLA's, by the entries `near`, as (distance, entry)."""

    def estimated(sizes: Mapping[str, int]) -> float:
        if estimate is None:
            return 1.0
        fused_us, xla_us = estimate(dataclasses.replace(problem, sizes=sizes))
        return fused_us / xla_us

    known = [(distance, estimated(entry.sizes), entry.ratio) for distance, entry in near]
    return neighbours.corrected(estimated(problem.sizes), known[: neighbours.COUNT])


def _config_of(entry: Entry, kernel: Kernel, problem: Problem) -> Any:
    """An entry's configuration, None if it does not fit the kernel or the problem any more."""
    try:
        config = config_data.from_data(kernel.Config, entry.config, problem.machine.architecture)
        config.check(problem)
    except (TypeError, ValueError):
        return None
    return config
