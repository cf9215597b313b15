"""Matmuls in two parts, XLA's product and a kernel for its collective: where that saves enough."""

from __future__ import annotations

import dataclasses
import math

from stretto.kernels.choice import costs, products, tables, transfers
from stretto.kernels.choice.choice import Choice
from stretto.kernels.operation import Kernel, Operation
from stretto.kernels.problem.problem import Problem
from stretto.kernels.problem.work import Work

MARGIN_OF_PARTS = 0.1
"""Share of XLA's time that two parts must save."""
FEW_ROWS, MOST_COLUMNS = 1024, 1024
LONG_CONTRACTION = {1: 4096, 2: 2048}
FEW_ROWS_TAKE = 0.8
"""Of products of few rows: rows, columns after a gather, contraction by the number of XLA's
kernels, and what two parts take of XLA's time. A shorter product of one kernel ends while the host
still launches: of a contraction of 3324 two parts took 1.07 and 1.08 of XLA's time."""
MESSAGES_TAKE = dict(all_gather=0.78, all_reduce=0.89)
"""Of XLA's time, products in two parts whose sums, or what is gathered, are whole messages: 0.88,
0.90 and 0.91; 0.77, 0.82, 0.80 and 0.77."""
RECORDING_SAVES_US = 9.0  # of a product that XLA divides, where it records the kernels
RECORDED_PARTS_SAVE_US = 6.0
"""Of a short product that is not divided, whose sum is copied to whole rows: XLA records these
copies with the product. 5.9 to 7.4 at three sizes. A vector's product is one kernel with a copy."""
SURE = 0.5
"""Of what a collective's kernel saves by the table, what a matmul with it is expected to save."""
DIVIDED = "XLA divides the product along its contraction"
SLOW = "the sum is no whole words"


def of_few_rows(
    operation: Operation, kernel: Kernel, problem: Problem, xla_us: float
) -> Choice | None:
    """A product of few rows in two parts, where that is faster though they hide nothing, or None.

    That is one that XLA divides along the contraction: XLA launches four kernels for it, which it
    records in a command buffer beside a kernel of ours, and not beside NCCL. And one of a long
    contraction, one whose sum is copied by kernels that XLA records, and one whose shards or sum
    are short and of whole messages, which need no copies.
    """
    work = operation.work(problem)
    default = kernel.default(problem)
    if work.product is None or work.traffic is None or not hasattr(default, "unfused"):
        return None
    name = work.traffic.collective
    is_known = problem.devices <= costs.MOST_DEVICES and problem.types.scales is None
    if not is_known or transfers.times(problem, name, 1) is None:
        return None
    by_messages = _saved_by_messages(operation, kernel, problem, xla_us)
    if name == "all_reduce":
        found = [(by_messages, "the sum is short"), (_saved_of_slow_sum(work, problem), SLOW)]
    else:
        by_records = _saved_by_records(work, xla_us), "XLA records what surrounds it"
        by_dividing = _saved_by_dividing(operation, problem, xla_us), DIVIDED
        found = [(by_messages, "the shards are short"), by_dividing, by_records]
    saved_us, why = max(found)
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
    is_one = transfers.launches(operation, problem) == 1 and not products.is_tiny(*work.product)
    return (1 - takes) * xla_us if is_whole and is_short and is_one else 0.0


def _saved_of_slow_sum(work: Work, problem: Problem) -> float:
    """Microseconds that two parts save where NCCL is slow, less copies to whole rows and back."""
    if work.traffic is None or problem.sizes["m"] > FEW_ROWS:
        return 0.0
    elements = math.prod(work.traffic.shape)
    found = transfers.times(problem, "all_reduce", elements)
    slow_us = transfers.misaligned_us(work.traffic)
    if not slow_us or found is None:
        return 0.0
    copied = 2e6 * work.traffic.size * (1 / costs.PADDED_BYTES + 1 / costs.CUT_BYTES)
    return slow_us + found[1] - found[0] - costs.COPIES_BESIDE_US[2] - copied


def _saved_by_records(work: Work, xla_us: float) -> float:
    """Microseconds that two parts of a sum save where XLA records what is launched around it.

    That is what fills up a tiny product of cuBLAS's, or copies a short sum to whole rows.
    """
    if work.product is None or work.traffic is None or work.traffic.gathers:
        return 0.0
    rows, _, columns = work.product
    if rows > FEW_ROWS or min(rows, columns) == 1:
        return 0.0
    if products.is_tiny(*work.product):
        return RECORDING_SAVES_US
    is_copied = costs.copies(work, work.traffic.itemsize) > 0
    return RECORDED_PARTS_SAVE_US if is_copied and xla_us < tables.SHORT_US else 0.0


def _saved_by_dividing(operation: Operation, problem: Problem, xla_us: float) -> float:
    """Microseconds that two parts save where XLA divides the product, or does not and it is long.

    Beside its own gather XLA fills up the operand that is not gathered; beside ours it does not.
    """
    work = operation.work(problem)
    if work.product is None or work.traffic is None:
        return 0.0
    rows, contraction, columns = work.product
    itemsize, gathers = work.traffic.itemsize, work.traffic.gathers
    if rows > FEW_ROWS:
        return 0.0
    if transfers.is_divided(operation, problem):
        if not gathers:
            return RECORDING_SAVES_US
        gathered = problem.devices * math.prod(work.traffic.shape)
        others = contraction * (rows + columns) - gathered
        hidden_us = 1e6 * 2 * itemsize * others / products.FILLED_BYTES
        return RECORDING_SAVES_US + transfers.misaligned_us(work.traffic) - hidden_us
    is_long = contraction >= LONG_CONTRACTION[transfers.launches(operation, problem)]
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
    found = transfers.times(problem, traffic.collective, math.prod(traffic.shape))
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
