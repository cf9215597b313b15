"""Times predicted for device counts that are not there, beside the measured ones.

The prediction is the kernels' own estimate from sizes and rates, the one that `backend="auto"`
falls back on, or the simulator's. Shown beside measurements, so that one sees how far to trust it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from stretto.benchmarks import simulated, table
from stretto.benchmarks.errors import BenchmarkError, UnavailableError
from stretto.benchmarks.operations import OPERATIONS, Case
from stretto.benchmarks.results import Measurement, Prediction
from stretto.benchmarks.shapes import MATMULS, Shape, shapes_of

MOST_DEVICES = 64


def predict(case: Case, device_kind: str) -> Prediction:
    """The fused kernel's and XLA's times for `case`.

    Raises:
      UnavailableError: the case cannot be cut into blocks, or its kernel makes no estimate.
    """
    case.check()
    try:
        estimate = importlib.import_module(f"stretto.kernels.fused.{case.operation.name}").estimate
    except (ImportError, AttributeError):
        raise UnavailableError(f"{case.operation.name} makes no estimate") from None
    shape = case.shape
    fused_us, xla_us = estimate(case.problem("gpu", device_kind))
    return Prediction(
        kernel=case.operation.name,
        m=shape.m,
        k=shape.k,
        n=shape.n,
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
    found: dict[tuple, Prediction] = {}
    for measurement in measurements:
        goals = shapes_of("goals", measurement.kernel, measurement.devices)
        shape = Shape(measurement.m, measurement.k, measurement.n)
        if measurement.kernel not in MATMULS or shape not in goals:
            continue
        for devices in counts:
            case = Case(
                operation=OPERATIONS[measurement.kernel],
                shape=shape,
                dtype=measurement.type,
                devices=devices,
            )
            key = (measurement.kernel, shape, measurement.type, devices)
            if key in found:
                continue
            say(str(case))
            try:
                estimate = predict(case, device_kind)
                found[key] = msgspec.structs.replace(
                    estimate, fused=simulated.fused_us(case), by="simulator"
                )
            except UnavailableError:
                continue
    return list(found.values())


def check_counts(counts: Sequence[int]) -> None:
    """Raises BenchmarkError for a device count that makes no sense."""
    for count in counts:
        if not 2 <= count <= MOST_DEVICES:
            raise BenchmarkError(f"--predict {count} must be between 2 and {MOST_DEVICES}.")


def print_predictions(
    console: Console, predictions: Sequence[Prediction], measurements: Sequence[Measurement]
) -> None:
    """Predicted and, where there is one, measured time of every case."""
    measured = {measurement.key: measurement for measurement in measurements}
    rows = Table(
        title="predicted, in us", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False
    )
    for column in ("kernel", "shape", "devices", "Stretto", "measured", "XLA", "measured"):
        rows.add_column(column, justify="left" if column in ("kernel", "shape") else "right")
    for one in sorted(predictions, key=lambda p: (p.kernel, p.m * p.k * p.n, p.devices)):
        real = measured.get(one.key)
        times = [real.of(peer) if real is not None else None for peer in ("fused", "xla")]
        fused, xla = (table.number(timed.time) if timed is not None else "" for timed in times)
        rows.add_row(
            one.kernel,
            one.shape,
            str(one.devices),
            table.number(one.fused),
            fused,
            table.number(one.xla),
            xla,
        )
    console.print(rows)
