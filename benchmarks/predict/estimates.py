"""Times predicted for device counts that are not there, beside the measured ones.

The prediction is the kernels' own estimate from sizes and rates, the one that `backend="auto"`
falls back on, or the simulator's. Shown beside measurements, so that one sees how far to trust it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from stretto.benchmarks.cases.case import Case
from stretto.benchmarks.cases.shapes import shapes_of
from stretto.benchmarks.errors import BenchmarkError, UnavailableError
from stretto.benchmarks.measurements.results import Measurement, Prediction, size_fields
from stretto.benchmarks.predict import simulated
from stretto.kernels.choice import choose
from stretto.kernels.operations import OPERATIONS
from stretto.kernels.problem.machine import Machine

MOST_DEVICES = 64


def predict(case: Case, device_kind: str) -> Prediction:
    """The fused kernel's and XLA's times for `case`.

    Raises:
      UnavailableError: the case cannot be cut into shares, or its kernel makes no estimate.
    """
    case.check()
    if not case.operation.kernels or case.work.product is None:
        raise UnavailableError(f"{case.operation.name} makes no estimate")
    problem = case.problem(Machine.of_kind("gpu", device_kind))
    kernel, _ = choose.serving(case.operation, problem)
    fused_us, xla_us = choose.estimate(case.operation, kernel, problem)
    return Prediction(
        kernel=case.operation.name,
        **size_fields(case.sizes),
        type=case.dtype,
        devices=case.devices,
        fused=fused_us,
        xla=xla_us,
    )


def predict_all(cases: Sequence[Case], device_kind: str) -> list[Prediction]:
    """Predictions of those of `cases` that have one."""
    found = []
    for case in cases:
        try:
            found.append(predict(case, device_kind))
        except UnavailableError:
            continue
    return found


def simulate_all(
    measurements: Sequence[Measurement],
    counts: Sequence[int],
    device_kind: str,
    say: Callable[[str], None] = lambda _: None,
) -> list[Prediction]:
    """Predictions by the simulator for the documented shapes among `measurements`.

    Each on `counts` devices, which must be there as CPU devices; what cannot be simulated is left
    out.
    """
    cases: dict[tuple, Case] = {}
    for one in filter(is_goal, measurements):
        for devices in counts:
            operation = OPERATIONS[one.kernel]
            case = Case(operation=operation, sizes=one.sizes, dtype=one.type, devices=devices)
            cases.setdefault(case.key, case)
    found = []
    for case in cases.values():
        say(str(case))
        try:
            estimate, fused = predict(case, device_kind), simulated.fused_us(case)
        except UnavailableError:
            continue
        found.append(msgspec.structs.replace(estimate, fused=fused, by="simulator"))
    return found


def is_goal(measurement: Measurement) -> bool:
    """Whether a matmul was timed at one of the shapes that the documented times are given for."""
    operation = OPERATIONS.get(measurement.kernel)
    if operation is None or not measurement.has_matmul:
        return False
    return measurement.sizes in shapes_of("goals", operation, measurement.devices)


def check_counts(counts: Sequence[int]) -> None:
    """Raises BenchmarkError for a device count that makes no sense."""
    for count in counts:
        if not 2 <= count <= MOST_DEVICES:
            raise BenchmarkError(f"--predict {count} must be between 2 and {MOST_DEVICES}.")
