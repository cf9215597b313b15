"""Who runs next. The order depends on the seed alone, so a run can be had again."""

from __future__ import annotations

import contextlib
import heapq
import random
from collections import deque
from collections.abc import Callable, Generator
from typing import Any, Protocol

from stretto.distributed.simulator.reports.errors import KernelFaultError, StepLimitError
from stretto.distributed.simulator.state.waiting import wake
from stretto.distributed.sites import site_of_error


class Order(Protocol):
    """The tasks that can run, in some order."""

    def push(self, task: Any) -> None:
        """Adds a task."""

    def pop(self) -> Any:
        """Takes out the task that runs next."""

    def __len__(self) -> int: ...


class RandomOrder:
    """Any task, with equal chance."""

    def __init__(self, seed: int):
        self._rng = random.Random(seed)
        self._tasks: list[Any] = []

    def push(self, task: Any) -> None:
        """Adds a task."""
        self._tasks.append(task)

    def pop(self) -> Any:
        """Takes out a random task."""
        tasks = self._tasks
        i = int(self._rng.random() * len(tasks))
        tasks[i], tasks[-1] = tasks[-1], tasks[i]
        return tasks.pop()

    def __len__(self) -> int:
        return len(self._tasks)


class RoundRobinOrder:
    """Each task in turn."""

    def __init__(self, seed: int):
        del seed
        self._tasks: deque[Any] = deque()

    def push(self, task: Any) -> None:
        """Adds a task at the end."""
        self._tasks.append(task)

    def pop(self) -> Any:
        """Takes out the task that has waited longest."""
        return self._tasks.popleft()

    def __len__(self) -> int:
        return len(self._tasks)


class PriorityOrder:
    """The task of highest priority, which falls to the bottom now and then.

    Priorities are random. Orders that need one task to be late at a few particular steps are rare
    under a random choice and likely here (probabilistic concurrency testing: Burckhardt et al.,
    ASPLOS 2010). The number of steps is not known beforehand, so the points of change come at
    random distances instead of at random steps of a known total.
    """

    _MEAN_STEPS_BETWEEN_CHANGES = 100

    def __init__(self, seed: int):
        self._rng = random.Random(seed)
        self._heap: list[tuple[float, int, Any]] = []
        self._pushes = 0
        self._lowest = 1.0

    def push(self, task: Any) -> None:
        """Adds a task at its priority."""
        if task.priority is None:
            task.priority = self._rng.random()
        if task.polled or self._rng.random() * self._MEAN_STEPS_BETWEEN_CHANGES < 1:
            self._lowest += 1.0
            task.priority = self._lowest
            task.polled = False
        self._pushes += 1
        heapq.heappush(self._heap, (task.priority, self._pushes, task))

    def pop(self) -> Any:
        """Takes out the task of highest priority."""
        return heapq.heappop(self._heap)[2]

    def __len__(self) -> int:
        return len(self._heap)


class TimeOrder:
    """The task that is earliest by the cost model's clock: a discrete event simulation."""

    def __init__(self, seed: int):
        del seed
        self._heap: list[tuple[float, int, Any]] = []
        self._pushes = 0

    def push(self, task: Any) -> None:
        """Adds a task at its time."""
        self._pushes += 1
        heapq.heappush(self._heap, (task.time, self._pushes, task))

    def pop(self) -> Any:
        """Takes out the earliest task."""
        return heapq.heappop(self._heap)[2]

    def __len__(self) -> int:
        return len(self._heap)


ORDERS: dict[str, Callable[[int], Order]] = {
    "random": RandomOrder,
    "round_robin": RoundRobinOrder,
    "pct": PriorityOrder,
    "time": TimeOrder,
}


class Scheduler:
    """Runs tasks, one step at a time, until none can run.

    Args:
      order: name of the order, a key of `ORDERS`.
      seed: of the order.
      max_steps: after so many steps a run is given up.

    Attributes:
      steps: taken so far.
      changes: how often something may have changed that a task could see: once for each step of a
        task that does not only look.
      time_of_change: the time of the last of these, by the cost model.
      waiters: tasks that have looked in vain, and wait for the next change.
    """

    def __init__(self, order: str, seed: int, max_steps: int):
        self._order = ORDERS[order](seed)
        self.push = self._order.push
        self.max_steps = max_steps
        self.steps = 0
        self.changes = 0
        self.time_of_change = 0.0
        self.waiters: list[Any] = []
        self._looking: set[Any] = set()

    @contextlib.contextmanager
    def looking(self, task: Any) -> Generator[None]:
        """`task` does nothing but look in here, so its steps wake no other that does the same."""
        self._changed(task)  # By what it did in this step already.
        is_outermost = task not in self._looking
        self._looking.add(task)
        try:
            yield
        finally:
            if is_outermost:
                self._looking.remove(task)

    def _changed(self, task: Any) -> None:
        if task not in self._looking:
            self.changes += 1
            self.time_of_change = task.time
            wake(self, self)

    def run(self) -> None:
        """Runs until every task is done or waits.

        Raises:
          StepLimitError: after `max_steps` steps.
          KernelFaultError: a task did what it can not.
        """
        order = self._order
        while len(order):
            task = order.pop()
            self.steps += 1
            if self.steps > self.max_steps:
                raise StepLimitError(
                    f"the simulation has taken max_steps={self.max_steps} steps and is not done;"
                    f" last to run: {task.describe()}. Raise max_steps, or look for a loop that"
                    " polls a value that never changes."
                )
            try:
                wait = next(task.body)
            except StopIteration:
                task.finish()
                self._changed(task)
                continue
            except (KernelFaultError, ValueError) as error:
                site = site_of_error(error)
                raise KernelFaultError(f"{task.describe()} at {site}: {error}") from error
            self._changed(task)
            if wait is None or wait.ready():
                order.push(task)
            else:
                task.waiting = wait
                wait.on.waiters.append(task)
