"""What no fused matmul serves, and what none is built with."""

from __future__ import annotations

from stretto.kernels.problem.problem import Problem


def check_pull_slots(pull_slots: int) -> None:
    """Raises ValueError for too few slots: a piece is stored while the next one is fetched."""
    if pull_slots < 2:
        raise ValueError(f"pull_slots={pull_slots} must be at least 2.")


def obstacle(problem: Problem) -> str | None:
    """Why the matmul cannot serve `problem`, or None if it can."""
    types = problem.types
    if types.lhs not in ("bfloat16", "float16"):
        return f"the kernel takes bfloat16 and float16, not {types.lhs}."
    if types.out not in ("bfloat16", "float16", "float32"):
        return f"the kernel stores bfloat16, float16 and float32, not {types.out}."
    if 0 in problem.sizes.values():
        return "an operand is empty."
    return None
