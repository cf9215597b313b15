"""A matmul with its collective on two devices: fused, in two parts or by XLA, by estimates."""

from __future__ import annotations

import dataclasses
import functools

from stretto.kernels.choice import tables, transfers, two_devices
from stretto.kernels.choice.choice import Choice
from stretto.kernels.operation import Kernel, Operation
from stretto.kernels.problem.problem import Problem

MARGIN, MARGIN_OF_SUMS = 0.06, 0.03
"""Share by which a kernel must be faster than XLA; and two parts of a sum which, as XLA's, are
limited by the host. They follow from what the estimates were off by at sizes of draws that they
were not fitted to."""


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
    _, xla_us = transfers.estimate(operation, problem)
    fused_us = transfers.fused_us(operation, problem, copied) + _correction_us(
        operation, kernel, problem
    )
    two_us = transfers.two_parts_us(operation, kernel, problem)
    is_tuned = tables.table_for(problem.machine.kind).nearest(problem) is not None
    if two_us is not None and two_us < fused_us and (copied or not is_tuned):
        return _in_two_parts(operation, kernel, problem, (two_us, xla_us))
    is_fused = fused_us < (1 - MARGIN) * xla_us
    reason = plain.reason
    if copied:
        reason += (
            f"; rows that are no multiples of 128 bytes cost as much as to copy"
            f" {copied / 2**20:.3g} MiB"
        )
    return dataclasses.replace(
        plain,
        problem=problem,
        backend="pallas" if is_fused else "xla",
        reason=reason,
        fused_us=fused_us,
        xla_us=xla_us,
    )


def _in_two_parts(
    operation: Operation, kernel: Kernel, problem: Problem, times: tuple[float, float]
) -> Choice:
    """Two parts, or XLA where their `times`, of both in microseconds, are too near."""
    work = operation.work(problem)
    name = "" if work.traffic is None else work.traffic.collective
    two_us, xla_us = times
    is_launched = two_devices.is_launched(work, problem.machine, two_us)
    margin = MARGIN_OF_SUMS if name == "all_reduce" and is_launched else MARGIN
    is_faster = two_us < (1 - margin) * xla_us
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
        if tables.is_of(entry, kernel, problem)
    ]
    if not near:
        return 0.0
    estimate = functools.partial(transfers.estimate, operation)
    fused_us, xla_us = estimate(plain)
    return tables.ratio_between(near, plain, estimate) * xla_us - fused_us
