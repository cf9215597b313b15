"""Times estimated from sizes and rates, for problems that nobody has measured.

The rates are what H100s of one NVLink domain reach (docs/performance.md): a matmul, bytes sent by
one GPU, and what a collective launch costs whatever it moves.
"""

from __future__ import annotations

from stretto.kernels.dispatch import Problem

MATMUL_FLOPS = 700e12  # per second and device, bf16
FUSED_BYTES = 250e9  # per second, sent by one device beside a matmul
PUSHED_BYTES = 300e9  # per second, sent by one device alone
XLA_BYTES = 270e9  # per second, NCCL alone
FUSED_LAUNCH_US = 20.0
XLA_LAUNCH_US = 12.0


def matmul_us(problem: Problem) -> float:
    """The arithmetic of one device, in microseconds."""
    return 2e6 * problem.m * problem.k * problem.n / problem.devices / MATMUL_FLOPS


def moved_bytes(rows: int, columns: int, itemsize: int, devices: int) -> float:
    """What one device sends so that all gather, or scatter, a matrix of the whole team."""
    return rows * columns * itemsize * (devices - 1) / devices


def all_gather_matmul(problem: Problem) -> tuple[float, float]:
    """(fused, XLA unfused) times of an all-gather matmul, in microseconds."""
    moved = moved_bytes(problem.m, problem.k, 2, problem.devices)
    return _fused_and_not(problem, moved)


def matmul_reduce_scatter(problem: Problem) -> tuple[float, float]:
    """(fused, XLA unfused) times of a matmul reduce-scatter, in microseconds."""
    moved = moved_bytes(problem.m, problem.n, 2, problem.devices)
    return _fused_and_not(problem, moved)


def matmul_all_reduce(problem: Problem) -> tuple[float, float]:
    """(fused, XLA unfused) times of a matmul all-reduce, in microseconds."""
    moved = 2 * moved_bytes(problem.m, problem.n, 2, problem.devices)
    return _fused_and_not(problem, moved)


def collective(sent: float, devices: int) -> tuple[float, float]:
    """(fused, XLA) times of a collective that moves `sent` bytes of the whole team's array."""
    moved = 1e6 * sent * (devices - 1) / devices
    return moved / PUSHED_BYTES + FUSED_LAUNCH_US, moved / XLA_BYTES + XLA_LAUNCH_US


def _fused_and_not(problem: Problem, moved: float) -> tuple[float, float]:
    """Fused, the longer of the two hides the other; unfused, they follow one another."""
    compute = matmul_us(problem)
    fused = max(1.1 * compute, 1e6 * moved / FUSED_BYTES) + FUSED_LAUNCH_US
    unfused = compute + 1e6 * moved / XLA_BYTES + XLA_LAUNCH_US
    return fused, unfused
