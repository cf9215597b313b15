"""Device time of compiled steps, measured as `stretto bench` measures a call."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Protocol

import jax
import numpy as np

from stretto.benchmarks.timing.timers import LoopTimer
from stretto.benchmarks.timing.turns import in_turns


class Runs(Protocol):
    """What can be queued again and again."""

    def run(self) -> jax.Array:
        """Queues one run; the result is there when the run has completed."""
        ...


def measure[Key: Hashable](
    programs: Mapping[Key, Runs], rounds: int, runs: int
) -> dict[Key, list[float]]:
    """Milliseconds of each program: medians of `runs` queued runs, one for each round.

    In each round all take their turn, in random order. On a CPU runs are not queued, for programs
    in flight together may wait for each other.
    """
    queued = jax.devices()[0].platform != "cpu"
    timers = [LoopTimer(_step(one), None, (), calls=1, queued=queued) for one in programs.values()]
    found = in_turns(timers, rounds * runs, per_visit=runs)
    return {
        key: (np.median(np.reshape(samples, (rounds, runs)), axis=1) / 1e3).tolist()
        for key, samples in zip(programs, found, strict=True)
    }


def _step(program: Runs) -> Callable[[jax.Array | None], tuple[jax.Array, None]]:
    """A run as `LoopTimer` takes it: its result says when it has completed."""

    def step(token: jax.Array | None) -> tuple[jax.Array, None]:
        del token  # Runs follow each other on the device by themselves.
        return program.run(), None

    return step
