"""What the choice of a backend has to know of the collectives' kernels: limits and sizes."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from stretto.kernels.choice.dispatch import Problem, Verdict
from stretto.kernels.collectives import exchange, summation

SUMMED = ("bfloat16", "float16", "float32", "int32")
# Below it every device of an all-reduce adds all of the array: one exchange in place of two.
ONE_SHOT_BYTES = 256 * 1024


@dataclasses.dataclass(frozen=True)
class Collective:
    """One of the collectives, as `dispatch.choose` asks of a kernel.

    Attributes:
      Config: the type of its configurations.
      sums: whether it adds.
      fused_from: bytes of the operand, per device, from which on the kernel was faster than NCCL
        on 4 H100s (docs/performance_notes.md). Below, where it has got faster since, only a table
        chooses it.
    """

    Config: type
    sums: bool
    fused_from: int

    def unsupported(self, problem: Problem, config: Any) -> str | None:
        """Why the kernel cannot serve `problem`, or None; ValueError for a bad `config`."""
        if config is not None:
            config.check()
        if problem.m * problem.n == 0:
            return "the array is empty."
        if self.sums and problem.dtype not in SUMMED:
            return f"the kernel adds {', '.join(SUMMED)}, not {problem.dtype}."
        return None

    def default_config(self, problem: Problem) -> Any:
        """The configuration for a size that no table has."""
        del problem
        return self.Config()

    def judge(self, problem: Problem) -> Verdict:
        """Which implementation should be faster, by the operand's size."""
        size = problem.m * problem.n * jnp.dtype(problem.dtype).itemsize
        limit = f"{self.fused_from / 2**20:g} MiB"
        if size < self.fused_from:
            return Verdict(backend="xla", reason=f"an operand below {limit} is faster so")
        return Verdict(backend="pallas", reason=f"an operand of {limit} or more is faster so")


ALL_GATHER = Collective(Config=exchange.Config, sums=False, fused_from=4 * 2**20)
REDUCE_SCATTER = Collective(Config=summation.Config, sums=True, fused_from=64 * 2**20)
ALL_REDUCE = Collective(Config=summation.Config, sums=True, fused_from=16 * 2**20)
ALL_TO_ALL = Collective(Config=exchange.Config, sums=False, fused_from=16 * 2**20)
COLLECTIVES = {
    "all_gather": ALL_GATHER,
    "reduce_scatter": REDUCE_SCATTER,
    "all_reduce": ALL_REDUCE,
    "all_to_all": ALL_TO_ALL,
}
