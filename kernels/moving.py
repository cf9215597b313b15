"""What the choice of a backend has to know of the collectives' kernels: limits and costs."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from stretto.kernels import costs
from stretto.kernels.dispatch import Problem

SUMMED = ("bfloat16", "float16", "float32", "int32")
# Below it every device of an all-reduce adds all of the array: one exchange in place of two.
ONE_SHOT_BYTES = 256 * 1024


@dataclasses.dataclass(frozen=True)
class Collective:
    """One of the collectives, as `dispatch.choose` asks of a kernel.

    `sent` is how often the whole array crosses the links, per device, times D / (D - 1).
    """

    sums: bool
    sent: float

    def unsupported(self, problem: Problem, config: Any) -> str | None:
        """Why the kernel cannot serve `problem`, or None if it can."""
        del config
        if problem.m * problem.n == 0:
            return "the array is empty."
        if self.sums and problem.dtype not in SUMMED:
            return f"the kernel adds {', '.join(SUMMED)}, not {problem.dtype}."
        return None

    def default_config(self, problem: Problem) -> None:
        """The kernels choose for themselves, from the size."""
        del problem

    def estimate(self, problem: Problem) -> tuple[float, float]:
        """Times in microseconds, (fused, XLA), from sizes and rates alone."""
        size = problem.m * problem.n * jnp.dtype(problem.dtype).itemsize
        return costs.collective(self.sent * size, problem.devices)


ALL_GATHER = Collective(sums=False, sent=1.0)
REDUCE_SCATTER = Collective(sums=True, sent=1.0)
ALL_REDUCE = Collective(sums=True, sent=2.0)
ALL_TO_ALL = Collective(sums=False, sent=1.0)
