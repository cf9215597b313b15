"""Vector clocks: for each task, the progress of the others that it is ordered after.

A clock is an int32 array indexed by timeline. Every task has a timeline, and so has every operation
that a task leaves running: a bulk copy, a matmul. `clock[t] >= n` says that the n-th stretch of
timeline `t` came before. A clock may be shorter than the number of timelines; what is missing is 0.
"""

from __future__ import annotations

import numpy as np

type Clock = np.ndarray

_GROWTH = 64  # Lengths are multiples of this, so that clocks seldom grow.


def join(into: Clock, other: Clock) -> Clock:
    """Adds what `other` knows to `into`; returns `into`, or a longer copy of it."""
    n = len(other)
    if len(into) < n:
        into = _grown(into, n)
    np.maximum(into[:n], other, out=into[:n])
    return into


def advance(clock: Clock, timeline: int, value: int) -> Clock:
    """Adds to `clock` that `timeline` has reached `value`."""
    if len(clock) <= timeline:
        clock = _grown(clock, (timeline // _GROWTH + 1) * _GROWTH)
    if clock[timeline] < value:
        clock[timeline] = value
    return clock


def knows(clock: Clock, timeline: int, value: int) -> bool:
    """Whether `clock` knows that `timeline` has reached `value`."""
    return timeline < len(clock) and clock[timeline] >= value


def empty() -> Clock:
    """A clock that knows nothing."""
    return np.zeros(0, np.int32)


def _grown(clock: Clock, size: int) -> Clock:
    out = np.zeros(size, np.int32)
    out[: len(clock)] = clock
    return out


class Timelines:
    """Allocates timelines."""

    def __init__(self) -> None:
        self.count = 0

    def new(self) -> int:
        """A timeline that nobody has used."""
        self.count += 1
        return self.count - 1


class AsyncTimelines:
    """The timelines of what one task leaves running, reused once the task knows they are done."""

    def __init__(self, timelines: Timelines) -> None:
        self._timelines = timelines
        self._pool: list[list[int]] = []

    def start(self, clock: Clock) -> tuple[int, int]:
        """A (timeline, value) for an operation that starts now, in a task that knows `clock`."""
        for entry in self._pool:
            if knows(clock, entry[0], entry[1]):
                entry[1] += 1
                return entry[0], entry[1]
        self._pool.append([self._timelines.new(), 1])
        return self._pool[-1][0], 1
