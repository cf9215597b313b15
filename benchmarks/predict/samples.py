"""The measurements to which the model of time is fitted: a row for each time of a case.

Of cases that were timed in several runs the last one counts, as in the documented tables: kernels
change. Several peers that came to one program have one time, and `auto` is the kernel or XLA, so
it is no row of its own.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import pathlib
from collections.abc import Sequence

import numpy as np

from stretto.benchmarks.cases.case import Case
from stretto.benchmarks.measurements import results
from stretto.benchmarks.measurements.results import Measurement, Results
from stretto.benchmarks.measurements.select import latest
from stretto.benchmarks.predict.formulas import FEATURES
from stretto.benchmarks.targets import machine_file
from stretto.benchmarks.targets.machine_file import Target
from stretto.kernels.operations import OPERATIONS
from stretto.kernels.problem.work import Work

FEW_ROWS = 256
"""Of a device's share: tiles are not full below it, and kernels of other kinds serve."""
WAYS = ("matmul", "own-matmul", "collective", "fused-collective", "unfused", "fused", "few-rows")
"""How a call can be made, each with a formula of its own."""
_PEERS = ("matmul", "own-matmul", "communication", "xla", "fused")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """One measured time.

    Attributes:
      way: of `WAYS`.
      case: operation, shape and type: what is left out together.
      features: in the order of `FEATURES`.
      us: the time.
      peer, devices, machine: as the results have them, for tables.
    """

    way: str
    case: str
    features: tuple[float, ...]
    us: float
    peer: str
    devices: int
    machine: str


def features_of(work: Work, itemsize: int, target: Target) -> tuple[float, ...]:
    """The features of a call on a machine, in the order of `FEATURES`."""
    card = machine_file.card_of(target, target.name)
    m, k, n = work.product or (0, 0, 0)
    traffic = work.traffic
    moved = itemsize * (m * k + work.matrices * k * n + m * n)
    devices = traffic.devices if traffic is not None else 1
    reduces = float(traffic is not None and traffic.collective == "all_reduce")
    rates = (card.bf16_tflops, card.memory_gb_per_s, target.link_gb_per_s)
    return (float(work.flops), float(moved), work.sent_bytes, float(devices), reduces, *rates)


def way_of(work: Work, peer: str) -> str | None:
    """How a peer of `stretto bench` makes a call; None for one that no formula is for."""
    alone = work.traffic is None or work.traffic.devices == 1
    if work.attention:
        return None
    if work.product is None:
        return {"xla": "collective", "fused": "fused-collective"}.get(peer) if not alone else None
    if peer in ("matmul", "own-matmul"):
        return peer
    if alone:
        return "matmul" if peer == "xla" else None
    if peer == "communication":
        return "collective"
    if peer == "fused":
        return fused_way(work)
    return "unfused" if peer == "xla" else None


def fused_way(work: Work) -> str:
    """The formula of a fused kernel: one for few rows, one for the others."""
    if work.product is None or work.traffic is None:
        return "fused-collective"
    return "few-rows" if work.product[0] <= FEW_ROWS * work.traffic.devices else "fused"


def samples_of(measurement: Measurement, where: Results) -> list[Sample]:
    """The rows of one case."""
    operation = OPERATIONS.get(measurement.kernel)
    target = machine_file.of_card(where.machine.card)
    if operation is None or target is None or measurement.type != "bfloat16":
        return []
    case = Case(
        operation=operation,
        sizes=measurement.sizes,
        dtype=measurement.type,
        devices=measurement.devices,
    )
    features = features_of(case.work, case.itemsize, target)
    name = f"{measurement.kernel} {measurement.shape} {measurement.type}"
    found = []
    for peer in _PEERS:
        timed, way = measurement.of(peer), way_of(case.work, peer)
        if timed is None or way is None:
            continue
        own = features if way != "collective" else _of_the_collective(features)
        found.append(
            Sample(
                way=way,
                case=name,
                features=own,
                us=timed.time,
                peer=peer,
                devices=measurement.devices,
                machine=f"{where.machine.card}, {where.machine.layout}",
            )
        )
    return found


def _of_the_collective(features: tuple[float, ...]) -> tuple[float, ...]:
    return (0.0, 0.0, *features[2:])


def results_folder() -> pathlib.Path:
    """Where the results lie that Stretto ships."""
    return pathlib.Path(str(importlib.resources.files("stretto.benchmarks"))) / "results"


def committed() -> list[pathlib.Path]:
    """The results files of single nodes that Stretto ships."""
    return sorted(results_folder().glob("*.json"))


@functools.cache
def all_samples() -> tuple[Sample, ...]:
    """The rows of all committed results."""
    found = sorted(map(results.read, committed()), key=lambda one: one.start_time)
    rows: list[Sample] = []
    for where, measurement in latest(found):
        rows += samples_of(measurement, where)
    return tuple(rows)


@functools.cache
def superseded_samples() -> tuple[Sample, ...]:
    """The rows of cases that a later run timed again."""
    kept = set(all_samples())
    rows: list[Sample] = []
    for one in map(results.read, committed()):
        for measurement in one.measurements:
            rows += [row for row in samples_of(measurement, one) if row not in kept]
    return tuple(rows)


def table_of(rows: Sequence[Sample]) -> dict[str, np.ndarray]:
    """The features of rows, as formulas take them."""
    columns = np.asarray([row.features for row in rows], dtype=np.float64).reshape(-1, 8).T
    return dict(zip(FEATURES, columns, strict=True))
