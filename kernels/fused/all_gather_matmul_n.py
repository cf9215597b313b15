"""`out = epilogue(lhs @ all_gather(rhs))`, rhs gathered along its columns: no kernel of its own.

It is the transpose of an all-gather matmul, `out^T = epilogue(all_gather(rhs^T) @ lhs^T)`, and so
the kernel of `all_gather_matmul` serves it, which takes `lhs` as a right-hand side given
transposed. XLA transposes the result, and the device's own shard of rhs unless that is given
transposed.
"""

from __future__ import annotations

import dataclasses

from stretto.kernels.choice import costs, tables
from stretto.kernels.choice.dispatch import Problem, Verdict
from stretto.kernels.fused import all_gather_matmul
from stretto.kernels.fused.all_gather_matmul import Config, unsupported

__all__ = ["Config", "default_config", "estimate", "judge", "unsupported"]


def default_config(problem: Problem) -> Config:
    """The configuration for a problem: what the table has of the transposed one, or its default."""
    found = _measured(problem)
    return found.config if found else all_gather_matmul.default_config(_transposed(problem))


def estimate(problem: Problem) -> tuple[float, float]:
    """Times in microseconds, (fused, XLA): those of the transposed problem, and the transposes.

    The former as measured, where the table has them, otherwise from sizes and rates.
    """
    found = _measured(problem)
    if found and found.fused_us and found.xla_us:
        fused_us, xla_us = found.fused_us, found.xla_us
    else:
        fused_us, xla_us = all_gather_matmul.estimate(_transposed(problem))
    devices = problem.devices
    turned = problem.m // devices * problem.n + problem.k * problem.n // devices
    return fused_us + costs.transpose(turned), xla_us


def judge(problem: Problem) -> Verdict:
    """Which implementation should be faster, by `estimate`."""
    return costs.judge(estimate(problem))


def _transposed(problem: Problem) -> Problem:
    return dataclasses.replace(problem, op="all_gather_matmul", m=problem.n, n=problem.m)


def _measured(problem: Problem) -> tables.Found | None:
    if not tables.exists(problem.device_kind):
        return None
    return tables.look_up(_transposed(problem), Config, 2)
