"""Statistics of repeated times: order statistics, and intervals of ratios and differences.

Samples of one visit follow each other at once and are much alike; what counts as an observation is
a visit, as its median. Timers visited in one round are neighbours in time and make a pair. The
intervals are Student's t intervals at 95%: of the mean of the pairs' log ratios (so of their
geometric mean), or of their differences.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np
from scipy import special

CONFIDENCE = 0.95


@dataclasses.dataclass(frozen=True)
class Spread:
    """Median, tenth and ninetieth percentile, in the unit of the samples."""

    median: float
    p10: float
    p90: float


@dataclasses.dataclass(frozen=True)
class Interval:
    """A mean, and its 95% interval."""

    value: float
    low: float
    high: float

    def holds(self, value: float) -> bool:
        """Whether the interval has `value` in it, so that it cannot be told apart from the mean."""
        return self.low <= value <= self.high

    @property
    def half(self) -> float:
        """Half the width: the number after "±"."""
        return (self.high - self.low) / 2


def spread(samples: Sequence[float]) -> Spread:
    """The `Spread` of `samples`; ValueError if there are none."""
    if not len(samples):
        raise ValueError("no samples; at least one is needed.")
    p10, median, p90 = np.percentile(np.asarray(samples, dtype=np.float64), [10, 50, 90])
    return Spread(median=float(median), p10=float(p10), p90=float(p90))


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Median of `ours[i] / theirs[i]`: samples of one round are pairs, so that drift cancels."""
    pairs = min(len(ours), len(theirs))
    if not pairs:
        raise ValueError("no samples; at least one pair is needed.")
    return float(np.median(np.asarray(ours[:pairs]) / np.asarray(theirs[:pairs])))


def visits(samples: Sequence[float], per_visit: int) -> np.ndarray:
    """The median of each visit, of which a sample list has one after another."""
    whole, rest = np.split(np.asarray(samples), [len(samples) // per_visit * per_visit])
    found = np.median(whole.reshape(-1, per_visit), axis=1)
    return np.append(found, np.median(rest)) if len(rest) else found


def interval(
    values: Sequence[float] | np.ndarray, confidence: float = CONFIDENCE
) -> Interval | None:
    """The mean of independent observations; None of fewer than two, which have no interval."""
    values = np.asarray(values, dtype=np.float64)
    if len(values) < 2:
        return None
    variance = values.var(ddof=1) / len(values)
    return _around(values.mean(), variance, len(values) - 1, confidence)


def geometric(ratios: np.ndarray, confidence: float = CONFIDENCE) -> Interval | None:
    """The geometric mean of independent ratios; None of fewer than two."""
    return _exponential(interval(np.log(ratios), confidence))


def ratio(
    ours: Sequence[float],
    theirs: Sequence[float],
    per_visit: int,
    confidence: float = CONFIDENCE,
) -> Interval | None:
    """Our time over theirs, by pairs of visits of one round; None of fewer than two pairs."""
    a, b = visits(ours, per_visit), visits(theirs, per_visit)
    pairs = min(len(a), len(b))
    return geometric(a[:pairs] / b[:pairs], confidence)


def ratio_of_runs(
    ours: Sequence[float], theirs: Sequence[float], per_visit: tuple[int, int]
) -> Interval | None:
    """Our time over theirs where they come from two runs, and make no pairs: by Welch's t.

    None of fewer than two visits in either.
    """
    logs = [
        np.log(visits(samples, count))
        for samples, count in zip((ours, theirs), per_visit, strict=True)
    ]
    if min(map(len, logs)) < 2:
        return None
    variances = [one.var(ddof=1) / len(one) for one in logs]
    total = sum(variances)
    freedom = sum(v**2 / (len(one) - 1) for v, one in zip(variances, logs, strict=True))
    freedom = total**2 / freedom if freedom else np.inf
    return _exponential(_around(logs[0].mean() - logs[1].mean(), total, freedom))


def _around(
    mean: float, variance: float, freedom: float, confidence: float = CONFIDENCE
) -> Interval:
    half = np.sqrt(variance) * _quantile(float(freedom), confidence)
    return Interval(float(mean), float(mean - half), float(mean + half))


@functools.cache
def _quantile(freedom: float, confidence: float) -> float:
    """A quantile of Student's t, cached: many intervals have the same degrees of freedom."""
    # `scipy.stats` has it too, and takes most of a second to import.
    return float(special.stdtrit(freedom, (1 + confidence) / 2))


def _exponential(found: Interval | None) -> Interval | None:
    return found and Interval(*(float(np.exp(value)) for value in dataclasses.astuple(found)))
