"""What tuned entries of a collective say of other sizes, and of a matmul that has it as a part."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from stretto.kernels.choice import costs, groups, products, tables
from stretto.kernels.choice.choice import Choice
from stretto.kernels.choice.tables import Entry
from stretto.kernels.operation import Kernel, Operation
from stretto.kernels.problem.problem import Problem
from stretto.kernels.problem.work import Traffic, Work

MARGIN_OF_COPIES, MARGIN_BESIDE_COPIES = 0.1, 0.05
"""Share by which a collective's kernel must be faster where copies that its sizes need were
estimated; and a matmul's, if it takes XLA no short time."""
SHORT_BY_HALF_WORDS_US, MARGIN_BY_HALF_WORDS = 40.0, 0.15
"""The same of a collective that takes XLA less, of rows that are no whole words of 32 bits: where
0.84 to 0.89 was expected, 0.96, 0.98, 1.00, 1.06 and 1.20 were measured."""
MARGIN_OF_THREE_COPIES = 0.08
"""The same of a matmul that takes XLA a short time, with both operands and the result copied."""
MARGIN_OF_PARTS = 0.1
"""Share of XLA's time that two parts must save."""
PART_BYTES = 16  # of which a part that NCCL moves at its full rate is a multiple
MISALIGNED_US = dict(all_gather=2.0e-6, reduce_scatter=1.1e-6, all_to_all=4.9e-6)
"""For each byte that a device sends of one that is not, beyond what an aligned one takes."""
SLOW_SUMS, SLOW_SUM_US = (500_000, 5_000_000), 17e-6
"""Bytes of an all-reduce that takes XLA so much longer for each of them if they are no whole words.
Matmuls with such sums took 36.7 in place of 25 (0.59 MB), 34 of 23 (0.56 MB) and 99 of 40 (4.1 MB),
and with 0.46 MB and 6.2 MB as long as others: NCCL has other protocols there."""
FEW_ROWS, MOST_COLUMNS = 1024, 1024
LONG_CONTRACTION = {1: 4096, 2: 2048}
FEW_ROWS_TAKE = 0.8
"""Of products of few rows: rows, columns after a gather, contraction by the number of XLA's
kernels, and what two parts take of XLA's time. A shorter product of one kernel ends while the host
still launches: of a contraction of 3324 two parts took 1.07 and 1.08 of XLA's time."""
MESSAGES_TAKE = dict(all_gather=0.78, all_reduce=0.89)
"""Of XLA's time, products in two parts whose sums, or what is gathered, are whole messages: 0.88,
0.90 and 0.91; 0.77, 0.82, 0.80 and 0.77."""
MOST_LAUNCHES, RECORDING_SAVES_US = 4, 9.0
"""Kernels of a product that XLA divides and whose operands it fills up, and what is saved where it
records them."""
RECORDED_PARTS_SAVE_US = 6.0
"""Of a short product that is not divided, whose sum is copied to whole rows: XLA records these
copies with the product. 5.9 to 7.4 at three sizes. A vector's product is one kernel with a copy."""
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


def of_few_rows(
    operation: Operation, kernel: Kernel, problem: Problem, xla_us: float
) -> Choice | None:
    """A product of few rows in two parts, where that is faster though they hide nothing, or None.

    That is one that XLA divides along the contraction: XLA launches four kernels for it, which it
    records in a command buffer beside a kernel of ours, and not beside NCCL. And one of a long
    contraction: at nine such sizes on two H200s two parts took 0.55 to 0.84 of XLA's time. And a
    short sum of whole messages, which need no copies.
    """
    work = operation.work(problem)
    default = kernel.default(problem)
    if work.product is None or work.traffic is None or not hasattr(default, "unfused"):
        return None
    name = work.traffic.collective
    is_known = problem.devices <= costs.MOST_DEVICES and problem.types.scales is None
    if not is_known or times(problem, name, 1) is None:
        return None
    by_messages = _saved_by_messages(operation, kernel, problem, xla_us)
    if name == "all_reduce":
        why = "the sum is short, or no whole words"
        saved_us = max(by_messages, _saved_of_slow_sum(work, problem))
    else:
        by_recording = _saved_by_recording(operation, problem, xla_us)
        saved_us = max(by_messages, by_recording)
        why = "XLA divides the product along its contraction"
        if by_messages > by_recording:
            why = "what is gathered is short, and made of whole messages"
    if saved_us < MARGIN_OF_PARTS * xla_us:
        return None
    config = dataclasses.replace(default, unfused=True)
    return Choice(
        problem=problem,
        kernel=kernel,
        config=config,
        backend="pallas",
        reason=f"{why}, a kernel has the {name.replace('_', '-')}",
        fused_us=xla_us - saved_us,
        xla_us=xla_us,
    )


def _saved_by_messages(
    operation: Operation, kernel: Kernel, problem: Problem, xla_us: float
) -> float:
    """Microseconds that two parts save where a short sum, or a short shard that is gathered, is of
    whole messages; 0 elsewhere."""
    work = operation.work(problem)
    if work.product is None or work.traffic is None:
        return 0.0
    rows, _, columns = work.product
    takes = MESSAGES_TAKE.get(work.traffic.collective, 1.0)
    is_whole = kernel.apart is not None and kernel.apart(problem) is not None
    is_short = min(rows, columns) <= FEW_ROWS and xla_us < tables.SHORT_US
    is_one = _launches(operation, problem) == 1 and not products.is_tiny(*work.product)
    return (1 - takes) * xla_us if is_whole and is_short and is_one else 0.0


def _saved_of_slow_sum(work: Work, problem: Problem) -> float:
    """Microseconds that two parts save where NCCL is slow, less copies to whole rows and back."""
    if work.traffic is None or problem.sizes["m"] > FEW_ROWS:
        return 0.0
    slow_us, found = misaligned_us(work.traffic), times(problem, "all_reduce", _elements(work))
    if not slow_us or found is None:
        return 0.0
    copied = 2e6 * work.traffic.size * (1 / costs.PADDED_BYTES + 1 / costs.CUT_BYTES)
    return slow_us + found[1] - found[0] - costs.COPIES_BESIDE_US[2] - copied


def _elements(work: Work) -> int:
    """Of a device's operand of the collective inside."""
    return 0 if work.traffic is None else math.prod(work.traffic.shape)


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
    return _launches(operation, problem) == MOST_LAUNCHES


def _launches(operation: Operation, problem: Problem) -> int:
    """Kernels that XLA launches for the product; 0 without a product and a collective."""
    work = operation.work(problem)
    if work.product is None or work.traffic is None:
        return 0
    sizes = *work.product, work.traffic.itemsize, problem.machine.multiprocessors
    return products.launches_of_xla(*sizes)


def _saved_by_recording(operation: Operation, problem: Problem, xla_us: float) -> float:
    """Microseconds that two parts save where XLA divides the product along the contraction.

    Beside its own gather XLA fills up the operand that is not gathered; beside ours it does not.
    """
    work = operation.work(problem)
    if work.product is None or work.traffic is None:
        return 0.0
    rows, contraction, columns = work.product
    itemsize, gathers = work.traffic.itemsize, work.traffic.gathers
    if rows > FEW_ROWS:
        return 0.0
    if products.is_tiny(*work.product):
        return 0.0 if gathers else RECORDING_SAVES_US
    if is_divided(operation, problem):
        if not gathers:
            return RECORDING_SAVES_US
        gathered = problem.devices * math.prod(work.traffic.shape)
        others = contraction * (rows + columns) - gathered
        hidden_us = 1e6 * 2 * itemsize * others / products.FILLED_BYTES
        return RECORDING_SAVES_US + misaligned_us(work.traffic) - hidden_us
    is_copied = costs.copies(work, itemsize) > 0 and min(rows, columns) > 1
    if not gathers and is_copied and xla_us < tables.SHORT_US:
        return RECORDED_PARTS_SAVE_US
    is_long = contraction >= LONG_CONTRACTION[_launches(operation, problem)]
    is_narrow = not gathers or columns <= MOST_COLUMNS
    return (1 - FEW_ROWS_TAKE) * xla_us if is_long and is_narrow else 0.0


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
