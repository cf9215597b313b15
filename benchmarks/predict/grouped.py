"""Rows in groups: a matmul of as many operations, slower by what was noted."""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np

from stretto.benchmarks.predict import noted
from stretto.benchmarks.predict.model import Model, Predicted
from stretto.benchmarks.targets.machine_file import Target
from stretto.kernels.problem.work import Work

_ITEMSIZE = 2


def grouped_matmul(model: Model, work: Work, target: Target) -> Predicted:
    """The time of Stretto's kernel, of 16 bits; its interval holds the slowest that was noted."""
    likely, most = _slowness(model)
    found = model.predict("own-matmul", work, _ITEMSIZE, target)
    return dataclasses.replace(found.times(likely), high=found.high * most)


def by_xla(model: Model, work: Work, target: Target) -> Predicted:
    """XLA's time: it multiplies all rows by the matrix of every group (`ragged_dot`)."""
    one = dataclasses.replace(work, matrices=1)
    return model.predict("matmul", one, _ITEMSIZE, target).times(work.matrices)


@functools.cache
def _slowness(model: Model) -> tuple[float, float]:
    """How many times longer than predicted the kernel took: as a rule, and at most."""
    times, ratios = noted.times(), []
    for one in times.grouped:
        work = Work(product=(one.m, one.k, one.n), matrices=one.groups)
        target = noted.target_of(one.source)
        ratios.append(one.us / model.predict("own-matmul", work, _ITEMSIZE, target).us)
    return math.exp(np.mean(np.log(ratios))), max(ratios)
