"""The ratio of a shape, predicted from several measured shapes near it."""

from __future__ import annotations

import math
from collections.abc import Sequence

COUNT = 4
POWER = 3


def weighted(values: Sequence[tuple[float, float]]) -> float:
    """The mean of the `COUNT` nearest values, given as (distance, value), nearest first.

    Weights are the distances' inverse `POWER`: what is twice as far counts an eighth (D. Shepard,
    "A two-dimensional interpolation function for irregularly-spaced data", 1968). A value at no
    distance is taken as it is.
    """
    if values[0][0] == 0:
        return values[0][1]
    weights = [distance**-POWER for distance, _ in values[:COUNT]]
    total = sum(weight * value for weight, (_, value) in zip(weights, values, strict=False))
    return total / sum(weights)


def corrected(estimated: float, near: Sequence[tuple[float, float, float]]) -> float:
    """An estimated ratio, corrected by how far the estimate was off nearby.

    Args:
      estimated: the ratio in question, by the estimate.
      near: (distance, ratio by the estimate, measured ratio) of what was measured, nearest first.
    """
    off = [(distance, math.log(real / guess)) for distance, guess, real in near]
    return estimated * math.exp(weighted(off))
