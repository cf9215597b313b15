"""The intervals of a case's figures, from times of the same rounds."""

from __future__ import annotations

import numpy as np

from stretto.benchmarks.measurements import spread
from stretto.benchmarks.measurements.results import Measurement, Timed
from stretto.benchmarks.measurements.spread import Interval
from stretto.benchmarks.peers.peer import MATMUL


def fill(measurement: Measurement, timed: Timed) -> None:
    """Adds the interval of each figure of `timed`, if there are enough rounds.

    The figures are computed anew for each round. Where the floor is the time of a program, a share
    of it is that program's time in the same round over `timed`; otherwise it is the bytes' time
    over the link.
    """
    xla, moved = measurement.of("xla"), measurement.of("communication")
    matmul = _fastest_matmul(measurement)
    found: dict[str, Interval | None] = {}
    if timed.over_xla is not None and xla is not None:
        found["over_xla"] = measurement.ratio(timed, xla)
    if timed.share_of_floor is not None:
        found["share_of_floor"] = _share_of_floor(measurement, timed)
    if timed.exposed is not None and matmul is not None:
        ours, alone = _rounds(measurement, timed, matmul)
        found["exposed"] = spread.interval(ours - alone)
    if timed.overlap_efficiency is not None and matmul is not None and moved is not None:
        ours, alone, sent = _rounds(measurement, timed, matmul, moved)
        overlap = (alone + sent - ours) / np.minimum(alone, sent)
        found["overlap_efficiency"] = spread.interval(overlap)
    timed.intervals = {name: (one.low, one.high) for name, one in found.items() if one is not None}


def _share_of_floor(measurement: Measurement, timed: Timed) -> Interval | None:
    source = next((one for one in measurement.timed if one.time == measurement.floor), None)
    if source is not None:
        return measurement.ratio(source, timed)
    (ours,) = _rounds(measurement, timed)
    return spread.geometric((measurement.floor or 0.0) / ours)


def _fastest_matmul(measurement: Measurement) -> Timed | None:
    alone = [timed for timed in measurement.timed if timed.role == MATMUL]
    return min(alone, key=lambda timed: timed.time, default=None)


def _rounds(measurement: Measurement, *timed: Timed) -> list[np.ndarray]:
    """The visits of each, of the rounds that all have."""
    found = [spread.visits(one.samples, measurement.per_visit) for one in timed]
    return [one[: min(map(len, found))] for one in found]
