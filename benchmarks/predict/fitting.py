"""Formulas of times fitted to measurements: by shares of their error, robust against outliers.

A formula is a function of positive parameters and of a table of features, an array each, that
gives a time for every row. What is made small is the logarithm of predicted over measured; from
`ROBUST` on an error counts by its size and no longer by its square, so that a kernel that was slow
at a few shapes does not bend the formula for all others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

type Table = Mapping[str, np.ndarray]
type Formula = Callable[[np.ndarray, Table], np.ndarray]

ROBUST = 0.08
MOST_STEPS = 40


def fit(formula: Formula, start: Sequence[float] | np.ndarray, table: Table, us: np.ndarray):
    """The parameters with which `formula` is nearest to the times `us`, an array like `start`."""
    logs = np.log(np.asarray(start, dtype=np.float64))
    errors, damping = _errors(formula, logs, table, us), 1e-3
    for _ in range(MOST_STEPS):
        slopes = np.stack(
            [
                (_errors(formula, logs + 1e-5 * unit, table, us) - errors) / 1e-5
                for unit in np.eye(len(logs))
            ],
            axis=1,
        )
        weights = np.minimum(1.0, ROBUST / np.maximum(np.abs(errors), 1e-12))
        normal = slopes.T @ (weights[:, None] * slopes) + damping * np.eye(len(logs))
        step = np.clip(-np.linalg.solve(normal, slopes.T @ (weights * errors)), -1.0, 1.0)
        tried = _errors(formula, logs + step, table, us)
        if _loss(tried) < _loss(errors):
            logs, errors, damping = logs + step, tried, damping / 4
        else:
            damping *= 8
        if np.abs(step).max() < 1e-5 or damping > 1e6:
            break
    return np.exp(logs)


def _errors(formula: Formula, logs: np.ndarray, table: Table, us: np.ndarray) -> np.ndarray:
    return np.log(formula(np.exp(logs), table) / us)


def _loss(errors: np.ndarray) -> float:
    size = np.abs(errors)
    return float(np.where(size < ROBUST, size**2 / 2, ROBUST * (size - ROBUST / 2)).sum())


def rows_of(table: Table, chosen: np.ndarray) -> dict[str, np.ndarray]:
    """The rows of a table for which `chosen` is true."""
    return {name: column[chosen] for name, column in table.items()}


def quantile(errors: np.ndarray, share: float) -> float:
    """The size that `share` of all such errors stay within, from those that were seen.

    Of n errors the ceil(share * (n + 1))-th in order of size (conformal prediction); the largest
    where that is beyond them.
    """
    if not len(errors):
        return float("nan")
    place = int(np.ceil(share * (len(errors) + 1))) - 1
    return float(np.sort(np.abs(errors))[min(place, len(errors) - 1)])
