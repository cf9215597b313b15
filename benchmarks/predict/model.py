"""The model of time: a formula for each way of making a call, fitted to the committed results.

Every prediction has an interval. Each measured case is predicted by a fit that has not seen it, in
any run or on any number of devices; the interval is as wide as 95% of the errors so made, of calls
made in the same way that are about as long. And every prediction says where it leaves what was
measured: there the interval is that of the cases that were, and no more is known.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from stretto.benchmarks.predict import fitting, formulas
from stretto.benchmarks.predict.fitting import Formula
from stretto.benchmarks.predict.formulas import FEATURES, Parameters
from stretto.benchmarks.predict.samples import (
    WAYS,
    Sample,
    all_samples,
    features_of,
    table_of,
)
from stretto.benchmarks.targets.machine_file import Target
from stretto.kernels.problem.work import Work

COVERED = 0.95
SHORT_US = 100.0
"""Below it launches are most of a call, and errors are larger."""
LEAST_CASES = 19
"""As many as it takes for the largest of their errors to hold 95% of all."""
UNSEEN = 1.2
"""How much wider an interval is on either side, as a factor, on cards, links or numbers of devices
that were not measured; our guess."""
_MARGIN = 1.5
"""How far beyond the largest call that was measured one counts as measured."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Predicted:
    """A predicted time, in microseconds.

    Attributes:
      us: the time.
      low, high: its interval.
      beyond: how it goes beyond the measurements, in words; empty if it does not.
    """

    us: float
    low: float
    high: float
    beyond: tuple[str, ...] = ()

    def __add__(self, other: Predicted) -> Predicted:
        """One after the other; both may be wrong in the same direction."""
        return Predicted(
            us=self.us + other.us,
            low=self.low + other.low,
            high=self.high + other.high,
            beyond=tuple(dict.fromkeys((*self.beyond, *other.beyond))),
        )

    def times(self, factor: float) -> Predicted:
        """So many calls."""
        low, high = self.low * factor, self.high * factor
        return dataclasses.replace(self, us=self.us * factor, low=low, high=high)

    def within(self, factor: float) -> Predicted:
        """The same time, in an interval that is wider by a factor on either side."""
        return dataclasses.replace(self, low=self.low / factor, high=self.high * factor)


NOTHING = Predicted(us=0.0, low=0.0, high=0.0)


def total(parts: Iterable[Predicted]) -> Predicted:
    """All of them, one after the other."""
    return functools.reduce(Predicted.__add__, parts, NOTHING)


type Fit = dict[str, np.ndarray]
"""By way, the parameters of its formula."""


def parameters_of(way: str) -> Parameters:
    """Names and start of the parameters of a way's formula."""
    return {
        "matmul": formulas.MATMUL,
        "own-matmul": formulas.OWN_MATMUL,
        "collective": formulas.COLLECTIVE,
        "fused-collective": formulas.COLLECTIVE,
        "unfused": formulas.UNFUSED,
        "fused": formulas.FUSED,
        "few-rows": formulas.FEW_ROWS,
    }[way]


def formula_of(way: str, fit: Fit) -> Formula:
    """A way's formula; some rest on cuBLAS's parameters, which are fitted first."""
    if way == "matmul":
        return formulas.matmul
    if way in ("collective", "fused-collective"):
        return formulas.collective
    cublas = fit["matmul"]
    if way == "own-matmul":
        return formulas.own_matmul(cublas[2])
    if way == "few-rows":
        return formulas.few_rows(cublas[2])
    return formulas.unfused(cublas) if way == "unfused" else formulas.fused(cublas[2])


def fitted_to(rows: Sequence[Sample], near: Fit | None = None) -> Fit:
    """The parameters of all ways; `near` are some that are not far."""
    fit: Fit = {}
    for way in WAYS:
        own = [row for row in rows if row.way == way]
        start = near[way] if near is not None else parameters_of(way).start
        us = np.asarray([row.us for row in own])
        fit[way] = fitting.fit(formula_of(way, fit), start, table_of(own), us)
    return fit


@dataclasses.dataclass(frozen=True)
class LeftOut:
    """A measured time beside its prediction by a fit that has not seen the case."""

    sample: Sample
    us: float

    @property
    def error(self) -> float:
        """Logarithm of predicted over measured."""
        return math.log(self.us / self.sample.us)

    @property
    def kind(self) -> tuple[str, bool]:
        """The group of an error: the way, and whether the call is short or long."""
        return (self.sample.way, self.us < SHORT_US)


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """A fit, and the errors that it makes.

    Attributes:
      fit: the parameters of every way.
      left_out: every row that it was fitted to, predicted without its case.
      without: by case, the fit that has not seen it.
    """

    fit: Fit
    left_out: tuple[LeftOut, ...]
    without: Mapping[str, Fit] = dataclasses.field(default_factory=dict)

    def leaving_out(self, case: str) -> Model:
        """The model that has not seen a case, in its parameters or in its intervals."""
        if case not in self.without:
            return self
        others = tuple(one for one in self.left_out if one.sample.case != case)
        return Model(self.without[case], others)

    def predict(self, way: str, work: Work, itemsize: int, target: Target) -> Predicted:
        """The time of a call on a machine.

        Args:
          way: of `WAYS`.
          work: the call's work on one device.
          itemsize: bytes of an element.
          target: the machine, of which only a node is looked at.

        Raises:
          BenchmarkError: the machine's file has no card.
        """
        return self._predicted(way, features_of(work, itemsize, target), itemsize)

    @functools.lru_cache(maxsize=1 << 14)  # noqa: B019 - there are few models in a process
    def _predicted(self, way: str, features: tuple[float, ...], itemsize: int) -> Predicted:
        us = self.us_of(way, features)
        width = math.exp(self.error_of((way, us < SHORT_US)))
        beyond = self._beyond(way, features, itemsize)
        found = Predicted(us=us, low=us / width, high=us * width, beyond=beyond)
        return found.within(UNSEEN if is_unseen(beyond) else 1.0)

    def us_of(self, way: str, features: tuple[float, ...]) -> float:
        """The time of one row of features."""
        table = {name: np.asarray([x]) for name, x in zip(FEATURES, features, strict=True)}
        return float(formula_of(way, self.fit)(self.fit[way], table)[0])

    def error_of(self, kind: tuple[str, bool], without: str = "") -> float:
        """The logarithm that 95% of a kind's cases stay within, `without` not counted.

        A case counts by the largest of its errors, for those of its runs are alike. Where few
        short cases were timed, the long ones count as well.
        """
        way, is_short = kind
        worst = _worst(self._kinds.get(kind, []), without)
        if not worst or (is_short and len(worst) < LEAST_CASES):
            worst |= _worst(self._kinds.get((way, not is_short), []), without)
        return fitting.quantile(np.asarray(list(worst.values())), COVERED)

    @functools.cached_property
    def _kinds(self) -> dict[tuple[str, bool], list[LeftOut]]:
        found: dict[tuple[str, bool], list[LeftOut]] = {}
        for one in self.left_out:
            found.setdefault(one.kind, []).append(one)
        return found

    @functools.cached_property
    def _reach(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """By way, the smallest and the largest features that were measured."""
        reach = {}
        for way in WAYS:
            rows = [one.sample.features for one in self.left_out if one.sample.way == way]
            reach[way] = (np.min(rows, axis=0), np.max(rows, axis=0))
        return reach

    def _beyond(self, way: str, features: tuple[float, ...], itemsize: int) -> tuple[str, ...]:
        least, most = self._reach[way]
        found = []
        for index, (name, value) in enumerate(zip(FEATURES, features, strict=True)):
            outside = value > most[index] * _MARGIN or 0 < value < least[index] / _MARGIN
            if name == "devices" and value > most[index]:
                found.append(f"more than {most[index]:.0f} devices")
            elif name in _WORDS and outside:
                found.append(_WORDS[name])
        if itemsize != 2:
            found.append("elements that are not of 16 bits")
        return tuple(found)


def _worst(rows: Sequence[LeftOut], without: str) -> dict[str, float]:
    """By case, the largest error of its rows; `without` is left out."""
    worst: dict[str, float] = {}
    for one in rows:
        if one.sample.case != without:
            worst[one.sample.case] = max(worst.get(one.sample.case, 0.0), abs(one.error))
    return worst


def is_unseen(beyond: Iterable[str]) -> bool:
    """Whether the machine is another one, or a larger one, than those that were measured."""
    return any(word in UNSEEN_WORDS or word.startswith("more than") for word in beyond)


_WORDS = {
    "flops": "products of another size",
    "sent": "transfers of another size",
    "tflops": "another type of card",
    "link": "other links",
}
UNSEEN_WORDS = (_WORDS["tflops"], _WORDS["link"])


@functools.cache
def model() -> Model:
    """The model fitted to the committed results; some seconds the first time in a process."""
    rows = all_samples()
    fit = fitted_to(rows)
    left_out: list[LeftOut] = []
    without: dict[str, Fit] = {}
    for case in dict.fromkeys(row.case for row in rows):
        without[case] = fitted_to([row for row in rows if row.case != case], near=fit)
        one = Model(without[case], ())
        left_out += [
            LeftOut(row, one.us_of(row.way, row.features)) for row in rows if row.case == case
        ]
    return Model(fit, tuple(left_out), without)
