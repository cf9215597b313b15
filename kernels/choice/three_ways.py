"""A matmul with its collective on two devices: fused, in two parts or by XLA, by estimates."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from stretto.kernels.choice import by_table, costs, tables, transfers, two_devices
from stretto.kernels.choice.choice import Choice
from stretto.kernels.operation import Kernel, Operation
from stretto.kernels.problem.problem import Problem

MARGIN, FAST_MARGIN, FAST_MARGIN_OF_PARTS = 0.06, -0.015, -0.08
"""Share by which a kernel must be faster than XLA; and two parts, where the host is fast. They
follow from what the estimates were off by at sizes of draws that they were not fitted to."""


def choose(
    operation: Operation, kernel: Kernel, problem: Problem, plain: Choice, copied: int
) -> Choice | None:
    """The way that is estimated to be fastest; None where such a matmul has no estimates.

    Args:
      operation, kernel, problem: the call, and the kernel that serves it.
      plain: the choice without copies, whose configuration the fused kernel has.
      copied: bytes that are copied for the fused kernel because of the sizes.
    """
    if transfers.of_collective(operation, problem) is None:
        return None
    of_hosts = [
        _estimates(operation, kernel, problem, plain.config, copied, host)
        for host in (1.0, two_devices.FAST_HOST)
    ]
    (fused_us, two_us, xla_us), _ = of_hosts
    is_tuned = tables.table_for(problem.machine.kind).nearest(problem) is not None
    if two_us is not None and two_us < fused_us and (copied or not is_tuned):
        return _in_two_parts(operation, kernel, problem, of_hosts)
    is_fused = _is_faster([(fused, xla) for fused, _, xla in of_hosts], MARGIN, FAST_MARGIN)
    return dataclasses.replace(
        plain,
        problem=problem,
        backend="pallas" if is_fused else "xla",
        reason=plain.reason + costs.said_of_copies(copied),
        fused_us=fused_us,
        xla_us=xla_us,
    )


type Times = tuple[float, float | None, float]
"""Microseconds, fused, in two parts and by XLA."""


def _estimates(
    operation: Operation, kernel: Kernel, problem: Problem, config: Any, copied: int, host: float
) -> Times:
    """Each way's estimate; the fused kernel's, corrected by what a table has nearby."""
    _, xla_us = transfers.estimate(operation, problem, host)
    fused_us = transfers.fused_us(operation, problem, copied, config, host)
    fused_us += _correction_us(operation, kernel, problem)
    return fused_us, transfers.two_parts_us(operation, kernel, problem, host), xla_us


def _is_faster(times: list[tuple[float, float]], margin: float, fast_margin: float) -> bool:
    """Whether a kernel is faster than XLA by these shares of its time, by either host.

    Args:
      times: in microseconds, the kernel's and XLA's, by this host and by a fast one.
      margin, fast_margin: the shares.
    """
    return all(
        kernel_us < (1 - share) * xla_us
        for (kernel_us, xla_us), share in zip(times, (margin, fast_margin), strict=True)
    )


def _in_two_parts(
    operation: Operation, kernel: Kernel, problem: Problem, of_hosts: list[Times]
) -> Choice:
    """Two parts, or XLA where their times are too near."""
    work = operation.work(problem)
    name = "" if work.traffic is None else work.traffic.collective
    times = [(two_us or xla_us, xla_us) for _, two_us, xla_us in of_hosts]
    is_faster = _is_faster(times, MARGIN, FAST_MARGIN_OF_PARTS)
    two_us, xla_us = times[0]
    return Choice(
        problem=problem,
        kernel=kernel,
        config=dataclasses.replace(kernel.default(problem), unfused=True),
        backend="pallas" if is_faster else "xla",
        reason=f"XLA's product and a kernel for the {name.replace('_', '-')} are estimated to be"
        f" {'faster' if is_faster else 'no faster'}",
        fused_us=two_us,
        xla_us=xla_us,
    )


def _correction_us(operation: Operation, kernel: Kernel, problem: Problem) -> float:
    """What the entries near a problem add to the estimate of its fused kernel."""
    plain = dataclasses.replace(problem, copied=0, applied=0)
    near = [
        (distance, entry)
        for distance, entry in tables.table_for(problem.machine.kind).near(problem)
        if by_table.is_of(entry, kernel, problem)
    ]
    if not near:
        return 0.0
    estimate = functools.partial(transfers.estimate, operation)
    fused_us, xla_us = estimate(plain)
    return by_table.ratio_between(near, plain, estimate) * xla_us - fused_us
