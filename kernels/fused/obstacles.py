"""The problems and the options that no fused matmul supports."""

from __future__ import annotations

from stretto.distributed.copies import MOST_BARRIERS
from stretto.kernels.problem.machine import BLACKWELL, HOPPER
from stretto.kernels.problem.problem import Problem
from stretto.kernels.problem.scales import FP8


def check_pull_slots(pull_slots: int) -> None:
    """Raises ValueError for too few slots: one piece is stored while the next one is fetched.

    And for more than an array has barriers.
    """
    if pull_slots < 2:
        raise ValueError(f"pull_slots={pull_slots} must be at least 2.")
    if pull_slots > MOST_BARRIERS:
        raise ValueError(f"pull_slots={pull_slots} must be at most {MOST_BARRIERS}.")


def check_unfused(unfused: bool, problem: Problem) -> None:
    """Raises ValueError for `unfused` with scales."""
    if unfused and problem.types.scales is not None:
        raise ValueError("unfused=True is not built for operands with scales; leave it out.")


def obstacle(problem: Problem) -> str | None:
    """Why the matmul cannot serve `problem`, or None if it can."""
    types = problem.types
    if types.lhs not in ("bfloat16", "float16"):
        return f"the kernel takes bfloat16 and float16, not {types.lhs}."
    return _of_result(problem)


def scaled(problem: Problem) -> str | None:
    """The same of operands in 8 bits with scales."""
    for dtype in (problem.types.lhs, problem.types.rhs):
        if dtype not in FP8:
            return f"the kernel takes {' and '.join(FP8)} with scales, not {dtype}."
    if problem.machine.architecture not in (HOPPER, BLACKWELL):
        return "products with scales are built for Hopper and Blackwell GPUs only."
    if problem.types.scales == "mx" and problem.machine.architecture != BLACKWELL:
        return "scales in float8_e8m0fnu are applied by the tensor cores of Blackwell GPUs only."
    return _of_result(problem)


def _of_result(problem: Problem) -> str | None:
    if problem.types.out not in ("bfloat16", "float16", "float32"):
        return f"the kernel stores bfloat16, float16 and float32, not {problem.types.out}."
    if 0 in problem.sizes.values():
        return "an operand is empty."
    return None
