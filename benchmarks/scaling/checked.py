"""Predicted beside measured: every committed time, by a fit that has not seen its case."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

import numpy as np

from stretto.benchmarks.predict import noted
from stretto.benchmarks.predict import over_nodes as over_nodes_times
from stretto.benchmarks.predict.model import SHORT_US, Predicted, model
from stretto.benchmarks.predict.over_nodes import NodeTime
from stretto.benchmarks.predict.samples import Sample, superseded_samples
from stretto.benchmarks.scaling.steps import step_model

GROUPS = {
    "matmul": "matmuls alone",
    "own-matmul": "matmuls alone",
    "unfused": "matmuls with a collective, XLA",
    "fused": "matmuls with a collective, fused",
    "few-rows": "matmuls of few rows with a collective, fused",
    "collective": "collectives, XLA",
    "fused-collective": "collectives, Stretto",
}
"""By way of making a call, how the summary groups it."""
NODES = {True: "matmuls with a collective, over nodes", False: "collectives, over nodes"}
"""The groups of calls over several nodes, by whether they multiply."""
STEPS = "steps of the transformer"
OLDER = "cases that a later run timed again"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checked:
    """A measured time in microseconds beside its prediction and the prediction's interval.

    Attributes:
      group: of `GROUPS`, `NODES`, `STEPS` or `OLDER`.
      what, devices, where, peer: the case in words, and who was timed.
    """

    group: str
    what: str
    devices: int
    where: str
    peer: str
    measured: float
    predicted: float
    low: float
    high: float

    @property
    def error(self) -> float:
        """The prediction's error, as a share of the measured time."""
        return abs(self.predicted / self.measured - 1)

    @property
    def is_inside(self) -> bool:
        """Whether the measured time lies within the interval."""
        return self.low <= self.measured <= self.high


def calls() -> list[Checked]:
    """Every time of the committed results that has a formula."""
    found = model()
    rows = []
    for one in found.left_out:
        width = math.exp(found.error_of(one.kind, one.sample.case))
        rows.append(_row(GROUPS[one.sample.way], one.sample, one.us, width))
    return rows


def older_calls() -> list[Checked]:
    """Times of cases that a later run timed again; the model was not fitted to them."""
    found = model()
    rows = []
    for sample in superseded_samples():
        us = found.us_of(sample.way, sample.features)
        width = math.exp(found.error_of((sample.way, us < SHORT_US)))
        rows.append(_row(OLDER, sample, us, width))
    return rows


def over_nodes(*, settled: bool = False) -> list[Checked]:
    """Every committed time over several nodes; if `settled`, without those that were disturbed."""
    found = model()
    times = [one for one in over_nodes_times.times() if not (settled and one.is_disturbed)]
    return [beside(one, over_nodes_times.predicted(found, one)) for one in times]


def beside(one: NodeTime, found: Predicted) -> Checked:
    """A time over nodes beside its prediction."""
    multiplies = one.case.work.product is not None
    alone = one.version == over_nodes_times.ALONE
    return Checked(
        group=GROUPS["matmul"] if alone else NODES[multiplies],
        what=one.name,
        devices=one.case.devices,
        where=one.where,
        peer=one.version,
        measured=one.us,
        predicted=found.us,
        low=found.low,
        high=found.high,
    )


def _row(group: str, sample: Sample, us: float, width: float) -> Checked:
    return Checked(
        group=group,
        what=sample.case,
        devices=sample.devices,
        where=sample.machine,
        peer=sample.peer,
        measured=sample.us,
        predicted=us,
        low=us / width,
        high=us * width,
    )


def steps() -> list[Checked]:
    """Every measured part of a step."""
    found, sources = step_model(), noted.times().sources
    rows = []
    for one in found.left_out:
        width = math.exp(found.error_of(one.time.case))
        source = sources[one.time.source]
        rows.append(
            Checked(
                group=STEPS,
                what=f"{one.time.model}, {one.time.sequence} tokens, {one.time.part}",
                devices=one.time.dp * one.time.tp,
                where=f"{source.card}, commit {source.commit}",
                peer=one.time.how,
                measured=1e3 * one.time.ms,
                predicted=one.us,
                low=one.us / width,
                high=one.us * width,
            )
        )
    return rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summary:
    """How well a group is predicted: errors as shares, and the share within the intervals."""

    group: str
    times: int
    median: float
    most: float
    inside: float


def summary(group: str, rows: Sequence[Checked]) -> Summary:
    """Of so many rows; `most` is what 95% of the errors stay below."""
    errors = [row.error for row in rows]
    return Summary(
        group=group,
        times=len(rows),
        median=float(np.median(errors)),
        most=float(np.quantile(errors, 0.95)),
        inside=sum(row.is_inside for row in rows) / len(rows),
    )


def summaries(rows: Iterable[Checked]) -> list[Summary]:
    """Of every group, in the order of `GROUPS`."""
    groups: dict[str, list[Checked]] = {group: [] for group in (*GROUPS.values(), *NODES.values())}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    return [summary(group, of_it) for group, of_it in groups.items() if of_it]
