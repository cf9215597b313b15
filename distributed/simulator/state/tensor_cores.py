"""The tensor cores of Blackwell: what a thread gives them to do, they do in order, some time later.

A thread learns that something is done by `tcgen05_commit_arrive` alone: the barrier that it names
gets an arrival once all is done that the thread had issued before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

from stretto.distributed.simulator.state import clocks
from stretto.distributed.simulator.state.barriers import Barrier
from stretto.distributed.simulator.state.races import Access
from stretto.distributed.sites import Site


@dataclass(slots=True)
class Operation:
    """A product, or a copy into tensor memory, that the tensor cores have yet to do or did.

    Attributes:
      name: of the function that issued it.
      issuer: the task that did.
      site: where.
      timeline, value: its place; operations of one thread share a timeline, since they end in
        order.
      clock, committed, tensor: what the issuer knew (`Task`), and the operation itself.
      time: of the issue, by the cost model.
    """

    name: str
    issuer: Any
    site: Site
    timeline: int
    value: int
    clock: clocks.Clock
    committed: clocks.Clock
    tensor: clocks.Clock
    time: float

    def access(self, what: str) -> Access:
        """An access to memory that the operation does now: "read" or "write"."""
        return Access(
            f"{self.name}'s {what}", self, self.site, self.issuer.device.index, self.clock,
            self.timeline, self.value, is_async=True,
        )  # fmt: skip

    def describe(self) -> str:
        """The operation in words."""
        return f"the {self.name} issued by {self.issuer.describe()}"


@dataclass(slots=True)
class _Completion:
    """The tensor cores as they arrive at a barrier."""

    clock: clocks.Clock
    committed: clocks.Clock
    tensor: clocks.Clock
    time: float

    @classmethod
    def of(cls, last: Operation | None, time: float) -> _Completion:
        """Of all operations up to `last`; of none, if there is none."""
        if last is None:
            return cls(clocks.empty(), clocks.empty(), clocks.empty(), time)
        return cls(last.clock, last.committed, last.tensor, time)

    def release(self) -> clocks.Clock:
        """What the operations that are done knew, and that they are done."""
        return self.clock.copy()


class TensorCores:
    """A block's tensor cores, as far as one thread of it has given them something to do.

    They run as a task of their own while there is something left.

    Attributes:
      machine, block, device: where they are.
      last: the last operation that was issued.
      time: when they are done with what they have done, by the cost model.
    """

    __slots__ = (
        "_queue", "_timeline", "block", "body", "device", "last", "machine", "polled", "priority",
        "time", "waiting",
    )  # fmt: skip

    def __init__(self, task: Any):
        self.machine = task.machine
        self.block = task.block
        self.device = task.device
        self.last: Operation | None = None
        self.time = 0.0
        self.waiting: Any = None
        self.polled = False
        self.priority: float | None = None
        self.body: Generator[Any, None, Any] | None = None
        self._queue: deque[Callable[[], None]] = deque()
        self._timeline = self.machine.timelines.new()
        self.machine.tensor_cores.append(self)

    @classmethod
    def of(cls, task: Any) -> TensorCores:
        """Those that `task` issues to, by its first warp."""
        warp = task.warps[0]
        if warp.tensor_cores is None:
            warp.tensor_cores = cls(task)
        return warp.tensor_cores

    def issue(
        self, name: str, task: Any, site: Site, run: Callable[[Operation], None]
    ) -> Operation:
        """Has them `run` an operation once they have done what was issued before."""
        value = 1 if self.last is None else self.last.value + 1
        place = self._timeline, value
        operation = Operation(
            name, task, site, *place,
            clock=clocks.advance(task.release(), *place),
            committed=task.committed.copy(),
            tensor=clocks.advance(task.tensor.copy(), *place),
            time=task.time,
        )  # fmt: skip
        self.last = operation

        def do() -> None:
            self.time = max(self.time, operation.time)
            begin = self.machine.now(self)
            run(operation)
            self.machine.note(self, name, begin)

        self._add(do)
        return operation

    def commit(self, barriers: Sequence[Barrier], task: Any, site: Site) -> None:
        """Has them arrive at `barriers` once they have done what was issued before."""
        last, now = self.last, task.time

        def arrive() -> None:
            self.time = max(self.time, now)
            for barrier in barriers:
                barrier.arrive(_Completion.of(last, self.time), site)

        self._add(arrive)

    def _add(self, entry: Callable[[], None]) -> None:
        self._queue.append(entry)
        if self.body is None:
            self.body = self._work()
            self.machine.scheduler.push(self)

    def _work(self) -> Generator:
        while self._queue:
            yield
            self._queue.popleft()()

    def finish(self) -> None:
        """Called once there is nothing left to do for now."""
        self.body = None

    def place(self) -> tuple[int, str]:
        """Their device and their row in a trace."""
        return self.device.index, f"tensor cores of {self.block.describe()}"

    def describe(self) -> str:
        """The tensor cores in words."""
        return f"the tensor cores of {self.block.describe()}"
