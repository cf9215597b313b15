"""Times estimated from sizes and rates, for problems that no table has.

The rates are what 4 H100s of one NVLink domain reach (docs/performance_notes.md). The estimates of
the fused kernels lean to the slow side: a call goes to XLA unless the fused kernel is clearly
faster.
"""

from __future__ import annotations

from stretto.distributed.schedule import ceil_div
from stretto.kernels.choice.dispatch import Problem, Verdict

BLOCKS = 132
TILE_M, TILE_N, TILE_K = 128, 256, 64
STEP_US = 0.7  # of a block, for one step of TILE_K along k
FUSED_BYTES = 245e9  # per second, sent by one device beside a matmul
XLA_BYTES = 270e9  # per second, NCCL alone
MEMORY_BYTES = 2.4e12  # per second, read and written by XLA's transposes
FUSED_LAUNCH_US = 25.0
XLA_LAUNCH_US = 12.0


def matmul(m: int, k: int, n: int) -> tuple[float, int]:
    """(microseconds, waves of tiles) of a matmul on one device, `[m, k] @ [k, n]`."""
    waves = ceil_div(ceil_div(m, TILE_M) * ceil_div(n, TILE_N), BLOCKS)
    return waves * ceil_div(k, TILE_K) * STEP_US, waves


def all_gather_matmul(problem: Problem) -> tuple[float, float]:
    """(fused, XLA unfused) times of an all-gather matmul, in microseconds."""
    local = matmul(problem.m, problem.k, ceil_div(problem.n, problem.devices))
    return _fused_and_not(local, _moved(problem.m * problem.k, problem.devices))


def matmul_reduce_scatter(problem: Problem) -> tuple[float, float]:
    """(fused, XLA unfused) times of a matmul reduce-scatter, in microseconds."""
    local = matmul(problem.m, ceil_div(problem.k, problem.devices), problem.n)
    return _fused_and_not(local, _moved(problem.m * problem.n, problem.devices))


def matmul_all_reduce(problem: Problem) -> tuple[float, float]:
    """(fused, XLA unfused) times of a matmul all-reduce, in microseconds."""
    local = matmul(problem.m, ceil_div(problem.k, problem.devices), problem.n)
    return _fused_and_not(local, 2 * _moved(problem.m * problem.n, problem.devices))


def transpose(elements: int) -> float:
    """Microseconds in which XLA transposes so many 16 bit elements."""
    return 1e6 * 2 * 2 * elements / MEMORY_BYTES


def judge(estimate: tuple[float, float]) -> Verdict:
    """What an estimate, (fused, XLA) in microseconds, says."""
    fused_us, xla_us = estimate
    backend = "pallas" if fused_us < xla_us else "xla"
    reason = "it is estimated to be faster"
    return Verdict(backend=backend, reason=reason, fused_us=fused_us, xla_us=xla_us)


def _moved(elements: int, devices: int) -> float:
    """Bytes that one device sends so that all gather, or scatter, a 16 bit matrix of the team."""
    return 2 * elements * (devices - 1) / devices


def _fused_and_not(local: tuple[float, int], moved: float) -> tuple[float, float]:
    """A kernel hides what it moves under all waves of its tiles but one; XLA hides nothing."""
    compute, waves = local
    exposed = max(0.0, 1e6 * moved / FUSED_BYTES - compute * (waves - 1) / waves)
    fused = compute + exposed + FUSED_LAUNCH_US
    return fused, compute + 1e6 * moved / XLA_BYTES + XLA_LAUNCH_US
