"""Device times are those between completions, however long it took to queue; turns are balanced."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections import Counter

import pytest

from stretto.benchmarks.timing import balance
from stretto.benchmarks.timing.timers import LoopTimer
from stretto.benchmarks.timing.turns import in_turns

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


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 9])
def test_in_a_design_everybody_follows_everybody_equally_often(count: int) -> None:
    rows = balance.design(count)
    assert len(rows) == (count if count % 2 == 0 else 2 * count)
    assert all(sorted(row) == list(range(count)) for row in rows)
    follows = Counter(pair for row in rows for pair in itertools.pairwise(row))
    each = len(rows) // max(count, 1)
    pairs = itertools.permutations(range(count), 2)
    assert follows == Counter(dict.fromkeys(pairs, each))
    turns = Counter((turn, place) for row in rows for turn, place in enumerate(row))
    assert set(turns.values()) == {each}


@pytest.mark.parametrize("count", [2, 6, 7])
def test_orders_are_whole_designs_in_any_order(count: int) -> None:
    found = balance.orders(range(count), random.Random(3))
    size = len(balance.design(count))
    first, second = (list(itertools.islice(found, size)) for _ in range(2))
    for rows in (first, second):
        follows = Counter(pair for row in rows for pair in itertools.pairwise(row))
        assert len(follows) == count * (count - 1) and len(set(follows.values())) == 1
    assert count == 2 or first != second
    # Part of a design of an even number has no pair twice.
    part = [pair for row in first[: size // 2] for pair in itertools.pairwise(row)]
    assert count % 2 or len(set(part)) == len(part)


class Counted:
    """A timer of no device: its samples say how many visits there had been."""

    calls = 1

    def __init__(self, name: str, log: list[str], fails_at: int | None = None):
        self.name, self.log, self.fails_at = name, log, fails_at
        self.visits = 0

    def visit(self, samples: int) -> list[float]:
        if self.visits == self.fails_at:
            raise RuntimeError(f"{self.name} failed")
        self.visits += 1
        self.log.append(self.name)
        return [float(self.visits)] * samples


def test_timers_take_turns_in_an_order_that_the_seed_gives() -> None:
    orders = []
    for seed in (1, 1, 2):
        log: list[str] = []
        timers = [Counted(name, log) for name in "abcdef"]
        found = in_turns(timers, 7, seed=seed, per_visit=3)
        assert found == [[1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 3.0]] * 6
        rounds = [log[start : start + 6] for start in range(0, 18, 6)]
        assert all(sorted(one) == list("abcdef") for one in rounds)
        assert rounds[0] != rounds[1]
        orders.append(log)
    assert orders[0] == orders[1] != orders[2]


def test_turns_end_once_there_is_enough() -> None:
    asked = []

    def enough(found) -> bool:
        asked.append([len(samples) for samples in found])
        return len(asked) == 2

    found = in_turns([Counted("a", []), Counted("b", [])], 20, per_visit=2, enough=enough)
    assert found == [[1.0, 1.0, 2.0, 2.0]] * 2 and asked == [[2, 2], [4, 4]]


def test_a_timer_that_fails_leaves_the_others() -> None:
    failures = []
    timers = [Counted("a", []), Counted("b", [], fails_at=1)]
    found = in_turns(timers, 4, per_visit=2, failed=lambda *failure: failures.append(failure))
    assert found == [[1.0, 1.0, 2.0, 2.0], []]
    assert [(place, str(error)) for place, error in failures] == [(1, "b failed")]
    with pytest.raises(RuntimeError, match="b failed"):
        in_turns([Counted("b", [], fails_at=0)], 1)
