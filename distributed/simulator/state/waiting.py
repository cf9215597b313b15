"""What a task waits for."""

from __future__ import annotations

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
