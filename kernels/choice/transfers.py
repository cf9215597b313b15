"""What tuned entries of a collective say of other sizes, and of a matmul that has it as a part."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from stretto.kernels.choice import costs, groups, products, tables, two_devices
from stretto.kernels.choice.choice import Choice
from stretto.kernels.choice.tables import Entry
from stretto.kernels.operation import Kernel, Operation
from stretto.kernels.problem.problem import Problem
from stretto.kernels.problem.work import Traffic

MARGIN_OF_COPIES, MARGIN_BESIDE_COPIES = 0.1, 0.05
"""Share by which a collective's kernel must be faster where copies that its sizes need were
estimated; and a matmul's."""
SHORT_US, MARGIN_OF_SHORT = 40.0, 0.15
"""The same of a collective that takes XLA less: where 0.84 to 0.89 was expected, 0.96, 0.98, 1.00,
1.06, 1.12 and 1.20 were measured."""
PART_BYTES = 16  # of which a part that NCCL moves at its full rate is a multiple
MISALIGNED_US = dict(all_gather=2.0e-6, reduce_scatter=1.1e-6, all_to_all=4.9e-6)
"""For each byte that a device sends of one that is not, beyond what an aligned one takes."""
SLOW_SUMS, SLOW_SUM_US = (2**19, 2**22), 17e-6
"""Bytes of an all-reduce that takes XLA so much longer for each of them if they are no whole words.
Matmuls with such sums took 36.7 in place of 25 (0.59 MB), 34 of 23 (0.56 MB) and 99 of 40 (4.1 MB),
and with 0.46 MB, 4.6 MB and 6.2 MB as long as others: NCCL has other protocols there."""


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


def estimate(operation: Operation, problem: Problem, host: float = 1.0) -> tuple[float, float]:
    """`costs.estimate`, with the times of the collective inside where a table has them.

    Of groups of rows in 16 bits on one device it is that of `groups`. On two devices the host's
    times are so many times those of `two_devices`.
    """
    work = operation.work(problem)
    if work.product is not None and work.traffic is None and problem.types.scales is None:
        sizes = *work.product, work.matrices, problem.types.itemsize
        of_both = (groups.by_kernel, groups.by_xla)
        by_kernel, by_xla = (f(*sizes, problem.machine.multiprocessors) for f in of_both)
        return by_kernel, by_xla
    collective_us = of_collective(operation, problem)
    if collective_us is None or work.traffic is None:
        return costs.estimate(work, problem.machine)
    slow_us = misaligned_us(work.traffic)
    by_xla = two_devices.by_xla(work, problem.machine, collective_us[1], slow_us, host)
    return fused_us(operation, problem, host=host), by_xla


def of_collective(operation: Operation, problem: Problem) -> tuple[float, float] | None:
    """`times` of the collective of a matmul on two devices; None elsewhere."""
    work = operation.work(problem)
    if work.product is None or work.traffic is None:
        return None
    name, devices = work.traffic.collective, work.traffic.devices
    if name not in two_devices.HOST_US or devices > costs.MOST_DEVICES:
        return None
    return times(problem, name, math.prod(work.traffic.shape))


def fused_us(
    operation: Operation, problem: Problem, copied: int = 0, config: Any = None, host: float = 1.0
) -> float:
    """`two_devices.fused` of a matmul that `of_collective` knows, by the default configuration."""
    tiles = (config or operation.kernels[0].default(problem)).tiles
    stands_for = operation.kernels[0].stands_for
    moved = problem.copied + problem.applied
    if stands_for is not None:
        moved += stands_for(problem)[1]
    return two_devices.fused(
        operation.work(problem),
        problem.machine,
        (tiles.tile_m, tiles.tile_n),
        copied,
        moved=moved,
        host=host,
        is_transposed=stands_for is not None,
    )


def two_parts_us(
    operation: Operation, kernel: Kernel, problem: Problem, host: float = 1.0
) -> float | None:
    """`two_devices.in_two_parts` of a matmul that `of_collective` knows.

    None where the kernel has no such parts, they have never been timed, or XLA has another program
    for the product: an outer one, which is no matmul (1 x 1 x 27 in two parts took 1.10 of XLA's
    time), and a tiny one of cuBLAS's (1.02 to 1.05 at four sizes).
    """
    found, product = of_collective(operation, problem), operation.work(problem).product
    has_parts = hasattr(kernel.default(problem), "unfused") and problem.types.scales is None
    if found is None or not has_parts or problem.copied or problem.applied:
        return None
    if product is None or product[1] == 1 or products.is_tiny(*product):
        return None
    is_whole = kernel.apart is not None and kernel.apart(problem) is not None
    work = operation.work(problem)
    kernel_us = min([found[0], *_of_more(problem, work.traffic)])
    return two_devices.in_two_parts(work, problem.machine, kernel_us, is_whole=is_whole, host=host)


def _of_more(problem: Problem, traffic: Traffic | None) -> list[float]:
    """Microseconds of a collective's kernel with more elements: with fewer it takes no longer."""
    if traffic is None:
        return []
    elements = math.prod(traffic.shape)
    entries = _entries(problem, traffic.collective)
    return [entry.fused_us for entry in entries if math.prod(entry.sizes.values()) >= elements]


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
        margin = MARGIN_OF_SHORT if xla_us < SHORT_US else MARGIN_OF_COPIES
        may_save = plain.backend == "pallas" or slow_us > 0
        is_fused = may_save and fused_us < (1 - margin) * xla_us
    return dataclasses.replace(
        plain,
        backend="pallas" if is_fused else "xla",
        reason=f"{plain.reason}; {of_sizes / 2**20:.3g} MiB are copied to whole rows and back",
        fused_us=fused_us,
        xla_us=xla_us,
    )
