"""`out = all_reduce(lhs @ rhs)`, the reduction under the matmul.

`matmul_reduce_scatter`, whose owners store each finished tile on every device: the second half of
a two-shot all-reduce. All devices hold bitwise the same result, since each element is summed once,
by its owner. Protocol and device code are in `matmul_reduce_scatter.py`.

Own tiles come between those for peers. If they all came last, a device would send all of its result
in the last part of its time, faster than the links can.
"""

from __future__ import annotations

import dataclasses
import functools

from stretto.kernels.choice import costs
from stretto.kernels.choice.dispatch import Problem, Verdict
from stretto.kernels.fused import matmul_reduce_scatter
from stretto.kernels.fused.add_config import AddConfig, default_tiles
from stretto.kernels.fused.matmul_reduce_scatter import unsupported

__all__ = ["Config", "default_config", "estimate", "judge", "launch", "unsupported"]

launch = functools.partial(matmul_reduce_scatter.launch, everywhere=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(AddConfig):
    """How the fused kernel is cut up; by default own tiles come between those for peers."""

    own_last: bool = False


def default_config(problem: Problem) -> Config:
    """The configuration for a problem that no table has."""
    return Config(tiles=default_tiles(problem))


def estimate(problem: Problem) -> tuple[float, float]:
    """Times in microseconds, (fused, XLA), from sizes and rates alone."""
    return costs.matmul_all_reduce(problem)


def judge(problem: Problem) -> Verdict:
    """Which implementation should be faster, by `estimate`."""
    return costs.judge(estimate(problem))
