"""Whether a case fits, said before anything is allocated."""

from __future__ import annotations

import os

from jax.sharding import Mesh

from stretto.benchmarks.cases.case import Case, bytes_of
from stretto.benchmarks.errors import UnavailableError
from stretto.benchmarks.measurements.machine import is_gpu
from stretto.benchmarks.timing import programs
from stretto.benchmarks.timing.timers import SAMPLES_PER_VISIT

GB = 1e9


def needed_bytes(case: Case, sets: int) -> int:
    """Bytes on one device: the operands of all peers, the largest peer's results twice, and those
    of the runs that are queued.
    """
    return case.footprint * (sets + 2) + (SAMPLES_PER_VISIT + 1) * _result_bytes(case)


def _result_bytes(case: Case) -> int:
    """Bytes of the largest result of a peer on one device."""
    if case.work.product is None:
        largest = max(bytes_of(operand, case.dtype) for operand in case.operands)
        return max(case.size, largest)
    m, _, n = case.work.product
    return m * n * case.itemsize


def available_bytes(mesh: Mesh) -> int | None:
    """Bytes that a device may allocate, for a CPU its share of the machine; None if unknown."""
    device = mesh.local_devices[0]
    if is_gpu(device.platform):
        stats = device.memory_stats() or {}
        return stats.get("bytes_limit")
    try:
        whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None
    return int(whole * 0.8) // mesh.size


def check_fits(case: Case, mesh: Mesh) -> None:
    """Raises UnavailableError if `case` needs more memory than a device has."""
    on_gpu = is_gpu(mesh.devices.flat[0].platform)
    sets = programs.number_of_sets(case.footprint) if on_gpu else 2
    needed, available = needed_bytes(case, sets), available_bytes(mesh)
    if available is not None and needed > available:
        raise UnavailableError(
            f"it needs {needed / GB:.1f} GB on each device and {available / GB:.1f} GB are there"
        )
