"""One results file out of several, of the same machine."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec

from stretto.benchmarks.errors import BenchmarkError
from stretto.benchmarks.measurements.results import Machine, Results


def merged(found: Sequence[Results]) -> Results:
    """One results file out of several of the same machine; where two hold a case, the later one's.

    They may be of different numbers of its devices: the machine's is then the largest.

    Raises:
      BenchmarkError: they are of different machines, or assume different links.
    """
    for one, other in itertools.combinations(found, 2):
        _check_alike(one, other)
    most = max(found, key=lambda one: one.machine.num_devices)
    cases = {one.key: one for results in found for one in results.measurements}
    predictions = {one.key: one for results in found for one in results.predictions}
    return msgspec.structs.replace(
        most,
        start_time=min(results.start_time for results in found),
        measurement_of_speed=all(results.measurement_of_speed for results in found),
        measurements=list(cases.values()),
        predictions=list(predictions.values()),
    )


def _check_alike(one: Results, other: Results) -> None:
    """Raises BenchmarkError unless the two differ in the number of devices only."""
    differing = [
        what
        for what in ("card", "platform", "driver")
        if getattr(one.machine, what) != getattr(other.machine, what)
    ]
    if not _layouts_agree(one.machine, other.machine):
        differing.append("layout")
    for what in differing:
        pair = getattr(one.machine, what), getattr(other.machine, what)
        raise BenchmarkError(
            f"results of different machines: {what} {pair[0]!r} and {pair[1]!r}; keep them in files"
            " of their own."
        )
    if one.link_gb_per_s != other.link_gb_per_s:
        raise BenchmarkError(
            f"floors of different links, {one.link_gb_per_s} and {other.link_gb_per_s} GB/s."
        )


def _layouts_agree(one: Machine, other: Machine) -> bool:
    """Whether both have one process, or as many devices in each; a single device has no layout."""
    if 1 in (one.num_devices, other.num_devices) or one.num_processes == other.num_processes == 1:
        return True
    return one.num_devices * other.num_processes == other.num_devices * one.num_processes
