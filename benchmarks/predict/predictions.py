"""Predicted times of cases on other numbers of devices, shown beside the measured ones."""

from __future__ import annotations

from collections.abc import Sequence

from stretto.benchmarks.cases.case import Case
from stretto.benchmarks.errors import BenchmarkError, UnavailableError
from stretto.benchmarks.measurements.results import Measurement, Prediction, size_fields
from stretto.benchmarks.measurements.select import is_goal
from stretto.benchmarks.predict.calls import call_time
from stretto.benchmarks.predict.model import model
from stretto.benchmarks.targets import machine_file
from stretto.kernels.operations import OPERATIONS

MOST_DEVICES = 1024
OTHERWISE = "dgx-h100"
"""The machine that stands for cards which no machine file has, such as CPUs in a rehearsal."""


def predict(case: Case, card: str) -> Prediction:
    """The fused kernel's and XLA's times for `case` on machines with such cards.

    Raises:
      UnavailableError: the case cannot be cut into shares.
    """
    target = machine_file.of_card(card) or machine_file.read(OTHERWISE)
    fused = call_time(model(), case, target, "fused").time
    xla = call_time(model(), case, target, "xla").time
    return Prediction(
        kernel=case.operation.name,
        **size_fields(case.sizes),
        type=case.dtype,
        devices=case.devices,
        fused=fused.us,
        fused_low=fused.low,
        fused_high=fused.high,
        xla=xla.us,
        xla_low=xla.low,
        xla_high=xla.high,
        beyond=list(fused.beyond),
    )


def predict_all(cases: Sequence[Case], card: str) -> list[Prediction]:
    """Predictions of those of `cases` that have one."""
    found = []
    for case in cases:
        try:
            found.append(predict(case, card))
        except UnavailableError:
            continue
    return found


def predict_goals(
    measurements: Sequence[Measurement], counts: Sequence[int], card: str
) -> list[Prediction]:
    """Predictions, on each of `counts`, of the documented shapes among `measurements`."""
    cases: dict[tuple, Case] = {}
    for one in filter(is_goal, measurements):
        for devices in counts:
            operation = OPERATIONS[one.kernel]
            case = Case(operation=operation, sizes=one.sizes, dtype=one.type, devices=devices)
            cases.setdefault(case.key, case)
    return predict_all(list(cases.values()), card)


def check_counts(counts: Sequence[int]) -> None:
    """Raises BenchmarkError for a device count that makes no sense."""
    for count in counts:
        if not 2 <= count <= MOST_DEVICES:
            raise BenchmarkError(f"--predict {count} must be between 2 and {MOST_DEVICES}.")
