"""Device times are those between completions, however long it took to queue the runs."""

from __future__ import annotations

import threading
import time

import pytest

from stretto.benchmarks.timing.timers import LoopTimer

RUN_S = 0.1


class Run:
    """A token that is ready `RUN_S` after the one before, as a device would have it."""

    def __init__(self, before: Run | None):
        self._ready = threading.Event()
        ends = time.perf_counter() if before is None else max(before.ends, time.perf_counter())
        self.ends = ends + RUN_S
        threading.Timer(self.ends - time.perf_counter(), self._ready.set).start()

    def block_until_ready(self) -> None:
        self._ready.wait()


@pytest.mark.parametrize("room", [1, 100])
def test_time_of_runs_that_fill_the_queue(room: int) -> None:
    """`room` runs fit into a stream; who queues one more waits for the first of them to end."""
    queue: list[Run] = []

    def program(token, *operands):
        run = Run(token)
        queue.append(run)
        if len(queue) > room:
            queue[-room - 1].block_until_ready()
        return run, None

    timer = LoopTimer(program, None, (), calls=10, queued=True)
    times = timer.visit(4)
    assert min(times) > 0.2 * RUN_S * 1e6 / 10
