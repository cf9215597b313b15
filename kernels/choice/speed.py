"""Which implementation is faster: as a tuned table has it, or by an estimate of sizes and rates."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from stretto.kernels.choice import by_table, costs, in_parts, tables, three_ways, transfers
from stretto.kernels.choice.choice import Choice
from stretto.kernels.operation import Kernel, Operation
from stretto.kernels.problem import machine
from stretto.kernels.problem.problem import Problem

UNTRIED = (machine.BLACKWELL,)
"""Architectures that kernels are built for and have never been run on. Only what a table has been
measured to be faster is taken there."""


def faster(operation: Operation, kernel: Kernel, problem: Problem) -> Choice:
    """The implementation that is faster: as measured, or by an estimate of sizes and rates."""
    plain = _without_copies(operation, kernel, dataclasses.replace(problem, copied=0, applied=0))
    of_sizes = 0 if _is_measured(kernel, problem) else kernel.copies(problem, plain.config)
    if why_no_estimate(problem) is None and not _has_time(operation, kernel, problem):
        found = three_ways.choose(operation, kernel, problem, plain, of_sizes)
        if found is not None:
            return found
    found = plain
    if problem.copied or problem.applied or of_sizes:
        found = _with_copies(operation, kernel, problem, plain, of_sizes)
    return _or_apart(operation, kernel, problem, found, of_sizes)


def _or_apart(
    operation: Operation, kernel: Kernel, problem: Problem, found: Choice, of_sizes: int
) -> Choice:
    """`found`, or the matmul in two parts, where that is faster by the table of its collective.

    `of_sizes` bytes are copied for the fused kernel. Where it needs none, a near entry has been
    tuned with two parts, too.
    """
    has_table = tables.exists(problem.machine.kind) and why_no_estimate(problem) is None
    is_known = has_table and has_estimate(operation, kernel, problem)
    if problem.copied or problem.applied or not is_known:
        return found
    _, xla_us = estimate(operation, kernel, problem)
    is_tuned = tables.table_for(problem.machine.kind).nearest(problem) is not None
    two = None
    if of_sizes or not (is_tuned or found.backend == "pallas"):
        two = in_parts.apart(operation, kernel, problem, xla_us)
    if two is None or two.fused_us is None:
        return found
    is_faster = found.backend == "pallas" and (found.fused_us or 0.0) <= two.fused_us
    return found if is_faster else two


def recorded_program(operation: Operation, kernel: Kernel, problem: Problem) -> Choice:
    """The implementation in a program that is recorded, as measured on two H200s."""
    size, most = costs.operand_bytes(operation.work(problem)), kernel.recorded_to or 0
    found = Choice(problem=problem, kernel=kernel, backend="xla", reason="")
    if not _is_timed_through_heap(problem):
        reason = "kernels in recorded programs were timed on two GPUs of Hopper's only"
        return dataclasses.replace(found, reason=reason)
    if size > most:
        reason = f"a recorded program was timed with operands up to {most / 2**10:g} KiB only"
        return dataclasses.replace(found, reason=reason)
    return dataclasses.replace(
        found,
        backend="pallas",
        reason=f"in a recorded program it is faster for operands up to {most / 2**10:g} KiB",
        config=kernel.default(problem),
    )


def through_heap(operation: Operation, problem: Problem) -> Choice | None:
    """The kernel that exchanges through the heap in a program that is not recorded.

    None where none of the operation's was measured to be faster: on two H200s, up to a size, of
    operands that are whole messages.
    """
    if not _is_timed_through_heap(problem):
        return None
    for kernel in operation.kernels:
        most = kernel.unrecorded_to
        if not most or kernel.obstacle(problem) is not None:
            continue
        config, size = kernel.default(problem), costs.operand_bytes(operation.work(problem))
        if size <= most and not kernel.copies(problem, config):
            return Choice(
                problem=problem,
                kernel=kernel,
                backend="pallas",
                reason=f"messages through the heap are faster for operands up to {most / 2**10:g}"
                " KiB",
                config=config,
            )
    return None


def why_no_estimate(problem: Problem) -> str | None:
    """Why no rates are known of the problem's GPU; None if they are."""
    if problem.machine.architecture in UNTRIED:
        return "the fused kernels were never run on such a GPU"
    if not problem.machine.is_rated:
        return f"the estimates are those of H100s and H200s, and not of {problem.machine.kind}"
    return None


def _is_timed_through_heap(problem: Problem) -> bool:
    return problem.devices == 2 and why_no_estimate(problem) is None


def _without_copies(operation: Operation, kernel: Kernel, problem: Problem) -> Choice:
    """The faster one, of operands that a kernel takes as they are."""
    kind, unknown = problem.machine.kind, why_no_estimate(problem)
    if unknown is None and kernel.untried:
        unknown = "the fused kernels were never timed beside XLA on several GPUs"
    found = _look_up(operation, kernel, problem) if not unknown or tables.exists(kind) else None
    if found is None and kernel.parts is not None and tables.exists(kind):
        found = _by_parts(kernel, kernel.parts(problem), problem)
    if found is not None:
        return found
    if unknown:
        reason = (
            f"{unknown}, and no table of {kind} says that the fused kernels are faster for this"
            " call; `stretto tune` writes one"
        )
        config = best_config(operation, kernel, problem)
        return Choice(problem=problem, backend="xla", reason=reason, kernel=kernel, config=config)
    if kernel.fused_from is not None:
        choice = costs.by_size(kernel.fused_from, operation.work(problem))
    else:
        is_measured = kernel.stands_for is not None and _measured(operation, kernel, problem)
        of_both = estimate(operation, kernel, problem)
        margin = _margin(operation, of_both[1])
        choice = costs.compare(of_both, 0.0 if is_measured else margin)
    return Choice(
        problem=problem, kernel=kernel, config=best_config(operation, kernel, problem), **choice
    )


def _margin(operation: Operation, xla_us: float) -> float:
    """The share of XLA's `xla_us` by which a kernel must be faster, nothing near being known."""
    is_short = xla_us < by_table.SHORT_US and not operation.communicates
    return by_table.MARGIN_OF_SHORT if is_short else costs.MARGIN


def _by_parts(
    kernel: Kernel, parts: Sequence[tuple[Kernel, Problem]], problem: Problem
) -> Choice | None:
    """What tables say of a kernel's parts; None where one of them has no entry near."""
    found = [by_table.look_up(part, of) for part, of in parts]
    if not all(found):
        return None
    said = "; ".join(f"{one.problem.operation}: {one.reason}" for one in found if one)
    return Choice(
        problem=problem,
        backend="pallas" if all(one and one.backend == "pallas" for one in found) else "xla",
        reason=f"it has the same products by either, and moves tokens. {said}",
        kernel=kernel,
        config=kernel.default(problem),
    )


def _with_copies(
    operation: Operation, kernel: Kernel, problem: Problem, plain: Choice, of_sizes: int
) -> Choice:
    """The faster one where the kernel's operands or results have to be copied besides.

    Or where an epilogue is applied to the results, which takes as long as a copy. `plain` is the
    faster one without; `of_sizes` bytes are copied because of the sizes.
    """
    if why_no_estimate(problem) is not None and plain.backend == "xla":
        return dataclasses.replace(plain, problem=problem)
    if kernel.fused_from is not None and of_sizes:
        return transfers.copied_to_rows(operation, problem, plain, of_sizes)
    if kernel.untried and problem.copied and plain.backend == "pallas":
        reason = f"{plain.reason}, but never with copies that put rows in order"
        others = dict(reason=reason, fused_us=None, xla_us=None)
        return dataclasses.replace(plain, problem=problem, backend="xla", **others)
    fused_us, xla_us = plain.fused_us, plain.xla_us
    if fused_us is None or xla_us is None:
        fused_us, xla_us = estimate(operation, kernel, problem)
    fused_us += costs.moved_in_memory_us(problem.copied + problem.applied)
    work, itemsize = operation.work(problem), problem.types.itemsize
    if kernel.stands_for is not None:
        work = work.transposed  # As the kernel multiplies.
    fused_us += costs.copied_for_sizes_us(work, itemsize, of_sizes)
    margin = 0.0
    if of_sizes:
        fused_us += costs.copies_launches_us(work, itemsize)
        margin = transfers.MARGIN_BESIDE_COPIES
    is_fused = plain.backend == "pallas" and fused_us < (1 - margin) * xla_us
    turned = plain.backend == "pallas" and not is_fused
    besides = "the copies" if problem.copied or of_sizes else "the epilogue after it"
    reason = f"{plain.reason}, but for {besides}" if turned else plain.reason
    reason += costs.said_of_copies(of_sizes)
    return dataclasses.replace(
        plain,
        problem=problem,
        backend="pallas" if is_fused else "xla",
        reason=reason,
        fused_us=fused_us,
        xla_us=xla_us,
    )


def has_estimate(operation: Operation, kernel: Kernel, problem: Problem) -> bool:
    """Whether `estimate` knows the times of such a call: of arithmetic beside a collective."""
    return kernel.fused_from is None and operation.work(problem).flops > 0


def _is_measured(kernel: Kernel, problem: Problem) -> bool:
    """Whether a table has the very problem, with all that a call of it copies."""
    found = by_table.look_up(kernel, problem) if tables.exists(problem.machine.kind) else None
    return found is not None and found.fused_us is not None


def _has_time(operation: Operation, kernel: Kernel, problem: Problem) -> bool:
    """Whether a table has the very problem, or the one that it is the same as."""
    found = _measured(operation, kernel, problem)
    return found is not None and found.fused_us is not None


def estimate(operation: Operation, kernel: Kernel, problem: Problem) -> tuple[float, float]:
    """Times in microseconds, (fused, XLA): by sizes and rates.

    For a kernel with `stands_for`: the times of that problem, measured where a table has them,
    and the time of the copies that order the fused kernel's operands.
    """
    if kernel.stands_for is None:
        return transfers.estimate(operation, problem)
    _, moved = kernel.stands_for(problem)
    found = _measured(operation, kernel, problem)
    if found is not None and found.fused_us and found.xla_us:
        fused_us, xla_us = found.fused_us, found.xla_us
    else:
        fused_us, xla_us = transfers.estimate(operation, problem)
    return fused_us + costs.moved_in_memory_us(moved), xla_us


def best_config(operation: Operation, kernel: Kernel, problem: Problem) -> Any:
    """The configuration for a problem: what a table has, or the kernel's default.

    A missing table gives no warning, because the configuration alone is needed.
    """
    found = _measured(operation, kernel, problem)
    return found.config if found is not None else kernel.default(problem)


def by_nearest(operation: Operation, kernel: Kernel, problem: Problem) -> Choice | None:
    """What the table says of one kernel of several, where its nearest entry is that kernel's.

    None where it is another's, and where no entry is near. Of each size a table has the kernel that
    was fastest there.
    """
    if not tables.exists(problem.machine.kind):
        return None
    near = tables.table_for(problem.machine.kind).near(problem)
    if not near or not by_table.is_of(near[0][1], kernel, problem):
        return None
    return _look_up(operation, kernel, problem)


def _measured(operation: Operation, kernel: Kernel, problem: Problem) -> Choice | None:
    """What the table has of `problem`, or of the one that it is the same as."""
    if not tables.exists(problem.machine.kind):
        return None
    found = _look_up(operation, kernel, problem)
    if found is None and kernel.stands_for is not None:
        # The problem of another operation: this operation's estimate does not apply.
        found = by_table.look_up(kernel, kernel.stands_for(problem)[0], asked=problem)
    return found


def _look_up(operation: Operation, kernel: Kernel, problem: Problem) -> Choice | None:
    """What the table says; where shapes lie between its entries, with the operation's estimate.

    Of what has no estimate, the measured ratios are interpolated themselves.
    """
    if not has_estimate(operation, kernel, problem):
        return by_table.look_up(kernel, problem)
    return by_table.look_up(kernel, problem, functools.partial(transfers.estimate, operation))
