"""Which of many measurements are the documented ones."""

from __future__ import annotations

import math
from collections.abc import Sequence

from stretto.benchmarks.cases.shapes import shapes_of
from stretto.benchmarks.measurements.results import Measurement, Results, order_of
from stretto.kernels.operations import OPERATIONS


def latest(found: Sequence[Results]) -> list[tuple[Results, Measurement]]:
    """Every case once, from the last file that holds it, with that file."""
    cases: dict[tuple, tuple[Results, Measurement]] = {}
    for one in found:
        for measurement in one.measurements:
            if measurement.timed:
                cases[(one.machine.card, one.machine.layout, *measurement.key)] = (one, measurement)
    return list(cases.values())


def is_goal(measurement: Measurement) -> bool:
    """Whether a matmul was timed at one of the shapes that the documented times are given for."""
    operation = OPERATIONS.get(measurement.kernel)
    if operation is None or not measurement.has_matmul:
        return False
    return measurement.sizes in shapes_of("goals", operation, measurement.devices)


def case_order(measurement: Measurement) -> tuple:
    """By operation, then the most devices first, then by work."""
    work = math.prod(measurement.sizes.values())
    return (order_of(measurement.kernel), -measurement.devices, work, measurement.key)
