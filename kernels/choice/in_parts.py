"""Matmuls in two parts, XLA's product and a kernel for its collective: where that saves enough."""

from __future__ import annotations

import math

from stretto.kernels.choice import by_table, transfers
from stretto.kernels.choice.choice import Choice
from stretto.kernels.operation import Kernel, Operation
from stretto.kernels.problem.problem import Problem

SURE = 0.5
"""Of what a collective's kernel saves by the table, what a matmul with it is expected to save."""


def apart(operation: Operation, kernel: Kernel, problem: Problem, xla_us: float) -> Choice | None:
    """A matmul in two parts, where the kernel of its collective saves enough of `xla_us`.

    None where it does not, where parts would be copied, and where the transfer is so short that
    launches decide.
    """
    config = None if kernel.apart is None else kernel.apart(problem)
    traffic = operation.work(problem).traffic
    if config is None or traffic is None:
        return None
    found = transfers.times(problem, traffic.collective, math.prod(traffic.shape))
    if found is None or found[1] < by_table.SHORT_US:
        return None
    saved = SURE * (found[1] - found[0])
    if saved < by_table.MARGIN * xla_us:
        return None
    return Choice(
        problem=problem,
        kernel=kernel,
        config=config,
        backend="pallas",
        reason=f"by its table the kernel of the {traffic.collective} should save {saved:.0f} us,"
        " and XLA multiplies",
        fused_us=xla_us - saved,
        xla_us=xla_us,
    )
