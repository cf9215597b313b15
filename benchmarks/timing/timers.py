"""Device time of a compiled loop, from the moments at which a queue of its runs completes.

Several runs of the program are queued without waiting, each taking the token of the one before.
The time from one run's completion to the next one's is the device's time for a run: dispatch from
Python (some 200 us for four devices) happens while the run before is busy. The first interval of a
visit holds the dispatch and the change from another program, and is dropped.

A thread watches the completions, since dispatching is not always over before them: a stream takes
some thousand launches, and who wants to queue more has to wait for room.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import jax
import numpy as np
from jax.experimental import multihost_utils

TARGET_RUN_US = 6000.0
"""Length of a run, so that the host's few microseconds of jitter are about 0.1%."""
MOST_CALLS = 400
LEAST_CALLS = 20
SAMPLES_PER_VISIT = 2


class Timer(Protocol):
    """Something that can be timed again and again, in turns with others."""

    def visit(self, samples: int) -> list[float]:
        """`samples` times of one call, in microseconds, the maximum over processes."""
        ...

    @property
    def calls(self) -> int:
        """Calls that one sample is the mean of."""
        ...

    @property
    def temp_bytes(self) -> int | None:
        """Memory of a device besides operands and results; None where nobody knows."""
        ...


def rounds_per_run(
    expected_us: float, num_sets: int, on_gpu: bool, run_us: float = TARGET_RUN_US
) -> int:
    """Rounds over all sets in one run, which lasts `run_us` if a call is as expected.

    One on a CPU, and where a round is longer than that. With one process per device XLA copies
    operands and results at the border of a program, so there a run has `LEAST_CALLS` at least.
    """
    if not on_gpu:
        return 1
    calls = min(MOST_CALLS, round(run_us / expected_us))
    if jax.process_count() > 1:
        calls = max(calls, LEAST_CALLS)
    return max(1, round(calls / num_sets))


class LoopTimer:
    """Times a program made from `programs.traced`.

    Args:
      program: maps (token, *operands) to the next token and a result.
      token: the first token.
      operands: the operands of every set.
      calls: calls of the function in one run.
      queued: whether runs are queued. On a CPU they are not: its collectives may deadlock when
        several programs are in flight, and its times are no measurement anyway.
    """

    def __init__(
        self,
        program: Callable[..., tuple[jax.Array, Any]],
        token: Any,
        operands: Sequence[jax.Array],
        calls: int,
        queued: bool,
    ):
        self.program = program
        self._token = token
        self._operands = tuple(operands)
        self._calls = calls
        self._queued = queued

    @property
    def calls(self) -> int:
        """Calls that one sample is the mean of."""
        return self._calls

    @property
    def temp_bytes(self) -> int | None:
        """What the compiler says that the program needs of a device, operands and results apart."""
        analysis = getattr(self.program, "memory_analysis", lambda: None)()
        return None if analysis is None else int(analysis.temp_size_in_bytes)

    def result(self) -> Any:
        """What a call returns: the result of one run's last call, on the first set of operands."""
        self._token, out = self.program(self._token, *self._operands)
        return jax.block_until_ready(out)

    def visit(self, samples: int) -> list[float]:
        """`samples` times of one call, in microseconds, the maximum over processes."""
        marks = self._queued_marks(samples + 1) if self._queued else self._marks(samples + 1)
        times = np.diff(np.asarray(marks)) * (1e6 / self._calls)
        return maximum_over_processes(times).tolist()

    def _queued_marks(self, runs: int) -> list[float]:
        marks = []
        with ThreadPoolExecutor(max_workers=1) as watcher:
            for _ in range(runs):
                self._token, _ = self.program(self._token, *self._operands)
                marks.append(watcher.submit(_completion, self._token))
        return [mark.result() for mark in marks]

    def _marks(self, runs: int) -> list[float]:
        marks = []
        for _ in range(runs):
            self._token, _ = self.program(self._token, *self._operands)
            marks.append(_completion(self._token))
        return marks


def _completion(token: jax.Array) -> float:
    token.block_until_ready()
    return time.perf_counter()


def maximum_over_processes(values: np.ndarray) -> np.ndarray:
    """Element by element, the largest over all processes; every process must call it."""
    if jax.process_count() == 1:
        return np.asarray(values)
    return np.asarray(multihost_utils.process_allgather(np.asarray(values))).max(axis=0)


def agreed(flag: bool) -> bool:
    """Whether any process says so; every process must call it."""
    return bool(maximum_over_processes(np.asarray([float(flag)]))[0])


def first_process_draws() -> int:
    """A number of 31 bits from the system's randomness, the same on all processes.

    Every process must call it.
    """
    drawn = np.asarray(secrets.randbits(31), dtype=np.int32)
    if jax.process_count() > 1:
        drawn = multihost_utils.broadcast_one_to_all(drawn)
    return int(drawn)


def first_process_says(flags: Sequence[bool]) -> list[bool]:
    """The first process's `flags`, on all; every process must call it, with as many."""
    if jax.process_count() == 1 or not flags:
        return list(flags)
    told = multihost_utils.broadcast_one_to_all(np.asarray(flags, dtype=np.int32))
    return [bool(flag) for flag in np.asarray(told)]
