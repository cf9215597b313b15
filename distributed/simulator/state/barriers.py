"""Barriers in shared memory as on the hardware: arrivals, pending bytes, a phase."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from stretto.distributed.simulator.reports.errors import KernelFaultError
from stretto.distributed.simulator.state.clocks import Clock, advance, empty, join
from stretto.distributed.simulator.state.memory import Buffer
from stretto.distributed.simulator.state.waiting import wake


@dataclass(frozen=True, slots=True)
class PhaseEnd:
    """What the end of a phase gives to those that wait for it.

    Attributes:
      clock: what all that have arrived so far knew, and the copies that have landed.
      committed: what of it `commit_smem` has covered.
      tensor: what of it is in order for the tensor cores (`Task.tensor`).
      time: when the phase ended, by the cost model.
    """

    clock: Clock
    committed: Clock
    tensor: Clock
    time: float


_KEPT_ENDS = 16
"""Ends of phases that a barrier remembers for those that come late to their wait."""


class Arriving(Protocol):
    """Who arrives at a barrier: a task, or the tensor cores once they are done."""

    committed: Clock
    tensor: Clock
    time: float

    def release(self) -> Clock:
        """What it gives to those that wait."""
        ...


class Barrier:
    """One barrier.

    A phase ends when all arrivals have come and all bytes that copies announced have landed; then
    the next begins. A wait names the parity of a phase, and ends once that phase is over.

    Attributes:
      name: what reports call it.
      expected: arrivals that a phase needs.
      orders_tensor_core: it orders what tensor cores and tensor memory do, too.
      pending: arrivals still to come in this phase.
      tx: bytes announced and not landed.
      phase: phases that are over.
      last: the end of the last of these.
    """

    __slots__ = (
        "_clock", "_committed", "_ends", "_tensor", "_time", "arrivals_seen", "expected", "last",
        "name", "orders_tensor_core", "pending", "phase", "scheduler", "tx", "waiters",
    )  # fmt: skip

    def __init__(self, name: str, expected: int, scheduler: Any, orders_tensor_core: bool = False):
        self.name = name
        self.expected = expected
        self.orders_tensor_core = orders_tensor_core
        self.pending = expected
        self.tx = 0
        self.phase = 0
        self._clock: Clock = empty()
        self._committed: Clock = empty()
        self._tensor: Clock = empty()
        self._time = 0.0
        self.last = PhaseEnd(empty(), empty(), empty(), 0.0)
        self._ends: deque[PhaseEnd] = deque(maxlen=_KEPT_ENDS)
        self.waiters: list = []
        self.scheduler = scheduler
        self.arrivals_seen: list[Any] = []

    def arrive(self, task: Arriving, site: Any) -> None:
        """One arrival, by `task`."""
        if self.pending == 0:
            raise KernelFaultError(
                f"barrier {self.name} expects {self.expected} arrivals a phase and gets one more,"
                f" at {site}, while {self.tx} bytes of this phase are still to land. Wait for the"
                " phase before the next arrival."
            )
        self.pending -= 1
        self._clock = join(self._clock, task.release())
        self._committed = join(self._committed, task.committed)
        if self.orders_tensor_core:
            self._tensor = join(self._tensor, task.tensor)
        self._time = max(self._time, task.time)
        self.arrivals_seen.append(site)
        self._check()

    def expect(self, num_bytes: int) -> None:
        """Announces bytes that a copy will bring; to be called before the copy's arrival."""
        self.tx += num_bytes

    def land(self, num_bytes: int, place: tuple[int, int], time: float) -> None:
        """Announced bytes have landed; the copy is at `place`, a (timeline, value)."""
        self.tx -= num_bytes
        self._clock = advance(self._clock, *place)
        self._time = max(self._time, time)
        self._check()

    def _check(self) -> None:
        if self.pending or self.tx:
            return
        self.phase += 1
        self.pending = self.expected
        clocks = (self._clock.copy(), self._committed.copy(), self._tensor.copy())
        self.last = PhaseEnd(*clocks, self._time)
        self._ends.append(self.last)
        self.arrivals_seen = []
        wake(self, self.scheduler, self.last)

    def is_over(self, waits: int) -> bool:
        """Whether the phase is over that a task waits for which has waited `waits` times before."""
        return self.phase % 2 != waits % 2

    def end_of(self, phase: int) -> PhaseEnd:
        """The end of a phase that is over, for a wait that finds it so.

        Not that of the last phase: the wait might have looked before the barrier went on.
        """
        back = self.phase - phase
        if back < 1:  # A wait for a later phase, which the parity has let through.
            return self.last
        return self._ends[-min(back, len(self._ends))]

    def progress(self) -> str:
        """How far the current phase is, in words."""
        text = f"{self.expected - self.pending} of {self.expected} arrivals in phase {self.phase}"
        return text + (f", {self.tx} bytes to land" if self.tx else "")


class BarrierArray:
    """An array of barriers, as one allocation makes it.

    Args:
      name: what reports call it.
      shape: of the array.
      expected: arrivals that a phase of each needs.
      cluster_axes: axes of the cluster along each of which an arrival reaches the other blocks;
        empty for a barrier of one block.
      to_leader: of the blocks along them, arrivals reach the first alone.
      orders_tensor_core: of each (`Barrier`).
    """

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...],
        expected: int,
        scheduler: Any,
        key: Any,
        cluster_axes: tuple = (),
        to_leader: bool = False,
        orders_tensor_core: bool = False,
    ):
        count = int(np.prod(shape))
        self.name = name
        self.items = [
            Barrier(name if not shape else f"{name}[{i}]", expected, scheduler, orders_tensor_core)
            for i in range(count)
        ]
        self.key = key
        self.cluster_axes = cluster_axes
        self.to_leader = to_leader
        self.orders_tensor_core = orders_tensor_core
        self.ids = id_buffer(name, shape)

    def named(self, name: str, shape: tuple[int, ...]) -> BarrierArray:
        """The same barriers as another scope calls and arranges them."""
        if (name, shape) == (self.name, self.ids.data.shape):
            return self
        expected, scheduler = self.items[0].expected, self.items[0].scheduler
        other = BarrierArray(
            name, shape, expected, scheduler, self.key, self.cluster_axes, self.to_leader,
            self.orders_tensor_core,
        )  # fmt: skip
        for mine, there in zip(self.items, other.items, strict=True):
            mine.name = there.name
        other.items = self.items
        return other


def id_buffer(name: str, shape: tuple[int, ...]) -> Buffer:
    """A buffer that holds each element's own position, so that a view of it says which is meant."""
    ids = np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape)
    return Buffer(ids, name=name, space="ids", device=0, block=None, key=None, written=True)


def pick(plan: Any, array: Any, env: list) -> int:
    """Which element of an array of barriers or semaphores a view means: the first it covers."""
    if not plan.steps:
        return 0
    return int(np.asarray(plan.within(array.ids, env).get()).reshape(-1)[0])
