"""Device time of compiled steps: several are queued, and the moments they complete are noted."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Hashable, Mapping
from typing import Protocol

import jax
import numpy as np


class Runs(Protocol):
    """What can be queued again and again."""

    def run(self) -> jax.Array:
        """Queues one run; the result is there when the run has completed."""
        ...


def measure[Key: Hashable](
    programs: Mapping[Key, Runs], rounds: int, runs: int
) -> dict[Key, list[float]]:
    """Milliseconds of each program: medians of `runs` queued runs, one for each round.

    In each round all take their turn, in random order.
    """
    queued = jax.devices()[0].platform != "cpu"
    order = random.Random(0)
    times: dict[Key, list[float]] = {key: [] for key in programs}
    for _ in range(rounds):
        for key in order.sample(list(programs), len(programs)):
            times[key].append(float(np.median(visit(programs[key], runs, queued))))
    return times


def visit(program: Runs, samples: int, queued: bool) -> list[float]:
    """`samples` times of one run, in milliseconds.

    The first run's time is dropped: it holds the dispatch and the change from another program.
    On a CPU runs are not queued, for programs in flight together may wait for each other.
    """
    losses, marks = [], []
    for _ in range(samples + 1):
        losses.append(program.run())
        if not queued:
            marks.append(_completion(losses[-1]))
    if queued:
        marks = [_completion(loss) for loss in losses]
    return [(after - before) * 1e3 for before, after in itertools.pairwise(marks)]


def _completion(loss: jax.Array) -> float:
    loss.block_until_ready()
    return time.perf_counter()
