"""The time that no implementation can beat: arithmetic or communication, whichever is longer."""

from __future__ import annotations

from stretto.benchmarks.cases.case import Case

LINK_GB_PER_S = 350.0
"""The rate of TMA copies over an H100's NVLink, one direction, in GB/s (1e9 bytes)."""


MEMORY_GB_PER_S = 4000.0
"""The rate of copies in an H200's memory, reads and writes together, in GB/s."""


def communication_floor(case: Case, gb_per_s: float = LINK_GB_PER_S) -> float:
    """Microseconds in which one device can send what it must; 0 where it sends nothing."""
    return case.work.sent_bytes / (gb_per_s * 1e3)


def memory_floor(case: Case) -> float:
    """Microseconds in which memory can move a case's bytes; 0 without a count of them."""
    return case.work.memory_bytes / (MEMORY_GB_PER_S * 1e3)


def floor(case: Case, matmul_us: float | None, gb_per_s: float = LINK_GB_PER_S) -> float | None:
    """The largest of `matmul_us` (the measured matmul) and the transfers by links and memory.

    None where it is not known: an operation whose matmul alone was not timed, or one without a
    matmul that sends nothing. For split attention, attention alone takes the place of the matmul.
    """
    communication = max(communication_floor(case, gb_per_s), memory_floor(case))
    if not case.work.flops:
        return communication or None
    return None if matmul_us is None else max(matmul_us, communication)


def expected_us(case: Case) -> float:
    """A rough time on an H100, in microseconds, to choose how many calls to time at once."""
    arithmetic = case.work.flops / 700e6
    memory = case.footprint / 2.5e6
    return max(arithmetic, memory, communication_floor(case)) + 10.0
