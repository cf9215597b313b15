"""What tuned entries of a collective say of other sizes, and of a matmul that has it as a part."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from stretto.kernels.choice import costs, products, tables
from stretto.kernels.choice.choice import Choice
from stretto.kernels.choice.tables import Entry
from stretto.kernels.operation import Kernel, Operation
from stretto.kernels.problem.problem import Problem
from stretto.kernels.problem.work import Traffic

MARGIN_OF_COPIES = 0.1
"""Share by which a kernel must be faster where copies that its sizes need were estimated."""
PART_BYTES = 16  # of which a part that NCCL moves at its full rate is a multiple
MISALIGNED_US = dict(all_gather=2.0e-6, reduce_scatter=1.1e-6, all_to_all=4.9e-6)
"""For each byte that a device sends of one that is not, beyond what an aligned one takes."""
FEW_ROWS, LONG_CONTRACTION, MOST_COLUMNS = 1024, 2048, 1024
FEW_ROWS_TAKE = 0.8
"""Of products of few rows: rows, contraction, columns after a gather, and what two parts take of
XLA's time."""
MOST_LAUNCHES, RECORDING_SAVES_US = 4, 9.0
"""Kernels of a product that XLA divides and whose operands it fills up, and what is saved where it
records them."""
SURE = 0.5
"""Of what a collective's kernel saves by the table, what a matmul with it is expected to save."""


def times(problem: Problem, name: str, elements: int) -> tuple[float, float] | None:
    """(kernel, XLA) times in microseconds of a collective of so many elements of each device.

    Straight lines between the logarithms of entries' sizes and times; beyond the last entry in
    proportion to the size. None where the table of the problem's GPU has fewer than two entries.

    Args:
      problem: whose GPU, number of devices and type the entries are of.
      name: of the collective.
      elements: of a device's operand.
    """
    known = sorted(
        (math.log(math.prod(entry.sizes.values())), entry.fused_us, entry.xla_us)
        for entry in _entries(problem, name)
    )
    if len(known) < 2:
        return None
    sizes, *of_both = zip(*known, strict=True)
    asked = math.log(max(1, elements))
    beyond = math.exp(max(0.0, asked - sizes[-1]))
    fused_us, xla_us = (
        float(beyond * np.exp(np.interp(asked, sizes, np.log(us)))) for us in of_both
    )
    return fused_us, xla_us


def misaligned_us(traffic: Traffic) -> float:
    """Microseconds that XLA's collective takes longer, whose parts begin at no 16 bytes.

    Measured on two H200s: with 2 or 8 bytes more than 25.2 MB in a part an all-gather took 183 in
    place of 134, a reduce-scatter 166 in place of 138, an all-to-all 243 in place of 120, and an
    all-reduce 231 in place of 226.
    """
    rows, columns = traffic.shape
    of_a_part = rows * columns * traffic.itemsize // (1 if traffic.gathers else traffic.devices)
    if traffic.devices > costs.MOST_DEVICES or not of_a_part % PART_BYTES:
        return 0.0
    return MISALIGNED_US.get(traffic.collective, 0.0) * traffic.sent_bytes


def _entries(problem: Problem, name: str) -> list[Entry]:
    """The entries of a collective with the problem's type, on as many of its GPUs."""
    if not tables.exists(problem.machine.kind):
        return []
    asked_of = (name, problem.types.lhs, problem.devices)
    entries = tables.table_for(problem.machine.kind).entries
    return [entry for entry in entries if (entry.op, entry.dtype, entry.devices) == asked_of]


def estimate(operation: Operation, problem: Problem) -> tuple[float, float]:
    """`costs.estimate`, with the times of the collective inside where a table has them."""
    work = operation.work(problem)
    measured = None
    if work.traffic is not None and work.product is not None:
        name = work.traffic.collective
        found = times(problem, name, math.prod(work.traffic.shape))
        if found is not None and name in costs.LAUNCH_BESIDE_US:
            by_xla = found[1] + misaligned_us(work.traffic)
            measured = min(entry.fused_us for entry in _entries(problem, name)), by_xla
    return costs.estimate(work, problem.machine, measured)


def copied_to_rows(operation: Operation, problem: Problem, plain: Choice, of_sizes: int) -> Choice:
    """The faster one of a collective whose operand and result are copied to whole rows and back.

    Without a table it is XLA: nobody knows what the copies leave of what a kernel gains. `plain`
    is the choice without the copies of `of_sizes` bytes.
    """
    found = times(problem, problem.operation, math.prod(problem.sizes.values()))
    fused_us, xla_us = found or (None, None)
    is_fused = False
    if fused_us is not None and xla_us is not None:
        row_bytes = problem.sizes["n"] * problem.types.itemsize
        fused_us += costs.copies_us(of_sizes, row_bytes)
        traffic = operation.work(problem).traffic
        xla_us += 0.0 if traffic is None else misaligned_us(traffic)
        is_fused = plain.backend == "pallas" and fused_us < (1 - MARGIN_OF_COPIES) * xla_us
    return dataclasses.replace(
        plain,
        backend="pallas" if is_fused else "xla",
        reason=f"{plain.reason}; {of_sizes / 2**20:.3g} MiB are copied to whole rows and back",
        fused_us=fused_us,
        xla_us=xla_us,
    )


def of_few_rows(
    operation: Operation, kernel: Kernel, problem: Problem, xla_us: float
) -> Choice | None:
    """A product that XLA divides along the contraction, in two parts; None of any other.

    XLA launches four kernels for it, which it records in a command buffer beside a kernel of ours,
    and not beside NCCL. So two parts are faster, though they hide nothing; and so they are for
    few rows and a long contraction: at nine such sizes on two H200s they took 0.55 to 0.84 of
    XLA's time.
    """
    work = operation.work(problem)
    default = kernel.default(problem)
    if work.product is None or work.traffic is None or not hasattr(default, "unfused"):
        return None
    name = work.traffic.collective
    is_known = problem.devices <= costs.MOST_DEVICES and problem.types.scales is None
    if not is_known or name == "all_reduce" or times(problem, name, 1) is None:
        return None
    saved_us = _saved_by_recording(operation, problem, xla_us)
    if saved_us < MARGIN_OF_COPIES * xla_us:
        return None
    config = dataclasses.replace(default, unfused=True)
    return Choice(
        problem=problem,
        kernel=kernel,
        config=config,
        backend="pallas",
        reason="XLA divides the product along its contraction, a kernel has the"
        f" {name.replace('_', '-')}",
        fused_us=xla_us - saved_us,
        xla_us=xla_us,
    )


def is_divided(operation: Operation, problem: Problem) -> bool:
    """Whether XLA divides the product along the contraction, and fills its operands up first."""
    work = operation.work(problem)
    if work.product is None or work.traffic is None:
        return False
    sizes = *work.product, work.traffic.itemsize, problem.machine.multiprocessors
    return products.launches_of_xla(*sizes) == MOST_LAUNCHES


def _saved_by_recording(operation: Operation, problem: Problem, xla_us: float) -> float:
    """Microseconds that two parts save where XLA divides the product along the contraction.

    Beside its own gather XLA fills up the operand that is not gathered; beside ours it does not.
    """
    work = operation.work(problem)
    if work.product is None or work.traffic is None:
        return 0.0
    rows, contraction, columns = work.product
    if rows > FEW_ROWS:
        return 0.0
    itemsize, gathers = work.traffic.itemsize, work.traffic.gathers
    if is_divided(operation, problem):
        if not gathers:
            return RECORDING_SAVES_US
        gathered = problem.devices * math.prod(work.traffic.shape)
        others = contraction * (rows + columns) - gathered
        hidden_us = 1e6 * 2 * itemsize * others / products.FILLED_BYTES
        return RECORDING_SAVES_US - hidden_us
    is_few = rows <= FEW_ROWS and contraction >= LONG_CONTRACTION
    return (
        (1 - FEW_ROWS_TAKE) * xla_us if is_few and (not gathers or columns <= MOST_COLUMNS) else 0.0
    )


def apart(operation: Operation, kernel: Kernel, problem: Problem, xla_us: float) -> Choice | None:
    """A matmul in two parts, where the kernel of its collective saves enough of `xla_us`.

    None where it does not, where parts would be copied, and where the transfer is so short that
    launches decide.
    """
    config = None if kernel.apart is None else kernel.apart(problem)
    traffic = operation.work(problem).traffic
    if config is None or traffic is None:
        return None
    found = times(problem, traffic.collective, math.prod(traffic.shape))
    if found is None or found[1] < tables.SHORT_US:
        return None
    saved = SURE * (found[1] - found[0])
    if saved < tables.MARGIN * xla_us:
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
