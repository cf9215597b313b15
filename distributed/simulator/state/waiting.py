"""What a task waits for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from stretto.distributed.sites import Site


class Waitable(Protocol):
    """Something whose change may let tasks go on."""

    waiters: list[Any]


@dataclass(slots=True)
class Wait:
    """A task's wait, which it yields to the scheduler.

    Attributes:
      on: the barrier, semaphore or other thing whose change is awaited.
      ready: whether the task can go on.
      site: where the wait is written.
      describe: what is awaited, with wanted and current value, in words.
      helpers: who could make it ready, in words.
      result: what made it ready gave to those that wait; None until then.
    """

    on: Waitable
    ready: Callable[[], bool]
    site: Site
    describe: Callable[[], str]
    helpers: Callable[[], str] = lambda: ""
    result: Any = None


@dataclass(frozen=True, slots=True)
class Waited:
    """A wait for a semaphore that is over.

    Attributes:
      semaphore, site: for what, and where.
      needed: how many signals, from the first one, had to have come.
      number: which wait of its task it is, from 1.
    """

    semaphore: Any
    site: Site
    needed: int
    number: int


class RecentWaits:
    """The last waits of a task for semaphores, by which reports explain a race."""

    __slots__ = ("_last", "count")

    def __init__(self):
        self._last: deque[Waited] = deque(maxlen=16)
        self.count = 0

    def add(self, semaphore: Any, site: Site, needed: int) -> None:
        """A wait is over."""
        self.count += 1
        self._last.append(Waited(semaphore, site, needed, self.count))

    def up_to(self, count: int) -> list[Waited]:
        """Those among the first `count` of the task, the latest first."""
        return [w for w in reversed(self._last) if w.number <= count]

    def after(self, count: int) -> list[Waited]:
        """Those after the first `count` of the task, the earliest first."""
        return [w for w in self._last if w.number > count]


def wake(on: Waitable, scheduler: Any, result: Any = None) -> None:
    """Lets every task that waits on `on`, and now can, run again; `result` is given to its wait."""
    if not on.waiters:
        return
    still = []
    for task in on.waiters:
        if task.waiting.ready():
            task.waiting.result = result
            task.waiting = None
            scheduler.push(task)
        else:
            still.append(task)
    on.waiters[:] = still
