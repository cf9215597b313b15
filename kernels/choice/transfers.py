"""What tuned entries of a collective say of other sizes, and of a matmul that has it as a part."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from stretto.kernels.choice import costs, groups, products, tables
from stretto.kernels.choice.choice import Choice
from stretto.kernels.choice.tables import Entry
from stretto.kernels.operation import Operation
from stretto.kernels.problem.problem import Problem
from stretto.kernels.problem.work import Traffic

MARGIN_OF_COPIES, MARGIN_BESIDE_COPIES = 0.1, 0.05
"""Share by which a collective's kernel must be faster where copies that its sizes need were
estimated; and a matmul's, if it takes XLA no short time."""
SHORT_BY_HALF_WORDS_US, MARGIN_BY_HALF_WORDS = 40.0, 0.15
"""The same of a collective that takes XLA less, of rows that are no whole words of 32 bits: where
0.84 to 0.89 was expected, 0.96, 0.98, 1.00, 1.06 and 1.20 were measured."""
MARGIN_OF_THREE_COPIES = 0.08
"""The same of a matmul that takes XLA a short time, with both operands and the result copied."""
PART_BYTES = 16  # of which a part that NCCL moves at its full rate is a multiple
MISALIGNED_US = dict(all_gather=2.0e-6, reduce_scatter=1.1e-6, all_to_all=4.9e-6)
"""For each byte that a device sends of one that is not, beyond what an aligned one takes."""
MOST_LAUNCHES = 4  # of kernels of a product that XLA divides and whose operands it fills up
SLOW_SUMS, SLOW_SUM_US = (500_000, 5_000_000), 17e-6
"""Bytes of an all-reduce that takes XLA so much longer for each of them if they are no whole words.
Matmuls with such sums took 36.7 in place of 25 (0.59 MB), 34 of 23 (0.56 MB) and 99 of 40 (4.1 MB),
and with 0.46 MB and 6.2 MB as long as others: NCCL has other protocols there."""


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
    size = rows * columns * traffic.itemsize
    of_a_part = size // (1 if traffic.gathers else traffic.devices)
    if traffic.devices > costs.MOST_DEVICES or not of_a_part % PART_BYTES:
        return 0.0
    least, most = SLOW_SUMS
    if traffic.collective == "all_reduce" and least < size < most and size % costs.WORD_BYTES:
        return SLOW_SUM_US * size
    return MISALIGNED_US.get(traffic.collective, 0.0) * traffic.sent_bytes


def _entries(problem: Problem, name: str) -> list[Entry]:
    """The entries of a collective with the problem's type, on as many of its GPUs."""
    if not tables.exists(problem.machine.kind):
        return []
    asked_of = (name, problem.types.lhs, problem.devices)
    entries = tables.table_for(problem.machine.kind).entries
    return [entry for entry in entries if (entry.op, entry.dtype, entry.devices) == asked_of]


def estimate(operation: Operation, problem: Problem) -> tuple[float, float]:
    """`costs.estimate`, with the times of the collective inside where a table has them.

    Of groups of rows in 16 bits on one device it is that of `groups`.
    """
    work = operation.work(problem)
    if work.product is not None and work.traffic is None and problem.types.scales is None:
        sizes = *work.product, work.matrices, problem.types.itemsize
        of_both = (groups.by_kernel, groups.by_xla)
        fused_us, xla_us = (f(*sizes, problem.machine.multiprocessors) for f in of_both)
        return fused_us, xla_us
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
        slow_us = 0.0 if traffic is None else misaligned_us(traffic)
        xla_us += slow_us
        is_by_half = row_bytes % costs.WORD_BYTES and xla_us < SHORT_BY_HALF_WORDS_US
        margin = MARGIN_BY_HALF_WORDS if is_by_half else MARGIN_OF_COPIES
        may_save = plain.backend == "pallas" or slow_us > 0
        is_fused = may_save and fused_us < (1 - margin) * xla_us
    return dataclasses.replace(
        plain,
        backend="pallas" if is_fused else "xla",
        reason=f"{plain.reason}; {of_sizes / 2**20:.3g} MiB are copied to whole rows and back",
        fused_us=fused_us,
        xla_us=xla_us,
    )


def margin_of_copies(operation: Operation, problem: Problem, xla_us: float, copies: int) -> float:
    """The share by which a kernel that needs so many copies must be faster than XLA's `xla_us`.

    All of it beside a tiny product of what is gathered: XLA may record that whole, and took 17 and
    36 at two sizes.
    """
    work = operation.work(problem)
    gathers = work.traffic is not None and work.traffic.gathers
    if gathers and work.product is not None and products.is_tiny(*work.product):
        return 1.0
    if xla_us >= tables.SHORT_US or is_divided(operation, problem):
        return MARGIN_BESIDE_COPIES
    return MARGIN_OF_THREE_COPIES if copies == 3 else tables.MARGIN_OF_SHORT


def is_divided(operation: Operation, problem: Problem) -> bool:
    """Whether XLA divides the product along the contraction, and fills its operands up first."""
    return launches(operation, problem) == MOST_LAUNCHES


def launches(operation: Operation, problem: Problem) -> int:
    """Kernels that XLA launches for the product; 0 without a product and a collective."""
    work = operation.work(problem)
    if work.product is None or work.traffic is None:
        return 0
    sizes = *work.product, work.traffic.itemsize, problem.machine.multiprocessors
    return products.launches_of_xla(*sizes)
