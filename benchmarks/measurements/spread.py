"""Order statistics of repeated times."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Spread:
    """Median, tenth and ninetieth percentile, in the unit of the samples."""

    median: float
    p10: float
    p90: float

    def overlaps(self, other: Spread) -> bool:
        """Whether the two ranges from `p10` to `p90` share a value."""
        return self.p10 <= other.p90 and other.p10 <= self.p90


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
