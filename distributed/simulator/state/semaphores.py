"""Semaphores: counters in global memory that any device may raise."""

from __future__ import annotations

import bisect
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from stretto.distributed.simulator.state.barriers import id_buffer
from stretto.distributed.simulator.state.clocks import Clock, empty, join
from stretto.distributed.simulator.state.races import Access
from stretto.distributed.simulator.state.waiting import wake
from stretto.distributed.sites import Site

_OF_LAUNCH = frozenset({"opening", "observed", "closing"})
"""Names of the counters of `stretto.distributed.handshake`."""


@dataclass(slots=True)
class _Signal:
    """One signal: the sum of all up to it, and what it releases (None: nothing)."""

    total: int
    clock: Clock | None
    committed: Clock | None
    device: int
    scope: str
    time: float


class Semaphore:
    """One counter, and what its signals carry.

    A signal releases what its task knows, and a wait takes it over, if each is in a scope that the
    other is in too: both "sys", or both on one device. A wait takes over only the signals that it
    needs, the first ones, though the counter may have gone on since: the wait might as well have
    looked before that, and then it would know no more. So what a run proves does not depend on
    how late a wait happens to look.

    Attributes:
      array: the array that it is an element of.
      index: its place in that, as one number.
      name: what reports call it.
      device: linear index of the device that owns it.
      signalled_by: how often each (device, who, site) has raised it.
      needed: the highest total that a wait has asked for so far.
      touches: the last atomic access of each timeline, for the check of plain stores.
      store: the last plain store.
      uses: how it has been waited on: True with, False without decrement.
      persistent: it is there before the kernel and after it, and has to be 0 between launches.
      early: peers may signal a persistent one before this device has started the launch.
      looks: the waits for a persistent one without decrement.
      takes: the bounded waits with decrement.
    """

    __slots__ = (
        "_joined", "_signals", "_taken", "array", "device", "early", "index", "looks", "name",
        "needed", "persistent", "scheduler", "signalled_by", "store", "takes", "total", "touches",
        "uses", "waiters",
    )  # fmt: skip

    def __init__(self, array: SemaphoreArray, index: int, scheduler: Any):
        self.array = array
        self.index = index
        self.name = array.name_of(index)
        self.device = array.device
        self.persistent = array.persistent
        self.early = array.early
        self.needed = 0
        self.looks: list[Access] = []
        self.takes: list[Access] = []
        self.total = 0
        self._taken = 0
        self._signals: list[_Signal] = []
        self._joined: dict[tuple[int, str], list[tuple[int, Clock, Clock]]] = {}
        self.waiters: list = []
        self.scheduler = scheduler
        self.signalled_by: Counter[tuple[int, str, Site]] = Counter()
        self.touches: dict[int, Access] = {}
        self.store: Access | None = None
        self.uses: set[bool] = set()

    @property
    def value(self) -> int:
        """The count."""
        return self.total - self._taken

    @property
    def is_of_one_device(self) -> bool:
        """Whether all its signals have the scope of one device."""
        return all(s.scope == "gpu" for s in self._signals)

    def ask(self, wanted: int) -> int:
        """A wait for `wanted` begins; the total that it needs."""
        needed = self._taken + wanted
        self.needed = max(self.needed, needed)
        return needed

    def set(self, value: int) -> None:
        """A plain store of `value`."""
        self._taken = self.total - value
        wake(self, self.scheduler)

    def signal(
        self,
        amount: int,
        clock: Clock | None,
        committed: Clock | None,
        device: int,
        scope: str,
        time: float,
    ) -> None:
        """Adds `amount`, by a task on `device`.

        The task knows `clock`, and of that `committed` has been committed by `commit_smem`; of a
        relaxed signal both are None.
        """
        self.total += amount
        self._signals.append(_Signal(self.total, clock, committed, device, scope, time))
        wake(self, self.scheduler)

    def take(
        self, wanted: int, device: int, scope: str, decrement: bool
    ) -> tuple[Clock, Clock, float]:
        """A wait for `wanted` by a task on `device` is over.

        Returns:
          What it takes over, what of it has been committed, and when the last signal that it
          needed arrived.
        """
        needed = self._taken + wanted
        self.uses.add(decrement)
        count = bisect.bisect_left(self._signals, needed, key=lambda s: s.total) + 1
        count = 0 if needed <= 0 else min(count, len(self._signals))
        if decrement:
            self._taken += wanted
        time = max((s.time for s in self._signals[max(count - 1, 0) : count]), default=0.0)
        return *self._carried(count, device, scope), time

    def look(self, device: int) -> tuple[Clock, Clock]:
        """What a task on `device` takes over by reading the count: all signals that it counts.

        `semaphore_read` acquires in scope "sys" (0.11.2, 0.12.0.1).

        Returns:
          What it takes over, and what of it has been committed.
        """
        return self._carried(len(self._signals), device, "sys")

    def _carried(self, count: int, device: int, scope: str) -> tuple[Clock, Clock]:
        """What the first `count` signals carry to a task on `device` that waits in `scope`."""
        known = self._joined.setdefault((device, scope), [(0, empty(), empty())])
        at = bisect.bisect_right(known, count, key=lambda entry: entry[0]) - 1
        done, clock, committed = known[at]
        if done == count:
            return clock, committed
        clock, committed = clock.copy(), committed.copy()
        for signal in self._signals[done:count]:
            is_near = signal.device == device
            if signal.clock is None or not (is_near or signal.scope == scope == "sys"):
                continue
            clock = join(clock, signal.clock)
            if is_near and signal.committed is not None:  # Shared memory is a device's own.
                committed = join(committed, signal.committed)
        known.insert(at + 1, (count, clock, committed))
        return clock, committed


class SemaphoreArray:
    """An array of semaphores, as one allocation makes it on one device."""

    def __init__(
        self, name: str, shape: tuple[int, ...], device: int, scheduler: Any, key: Any,
        persistent: bool = False, early: bool = False,
    ):  # fmt: skip
        self.name = name
        self.shape = shape
        self.device = device
        self.key = key
        self.persistent = persistent
        self.early = early
        self.ids = id_buffer(name, shape)
        self.items = [Semaphore(self, i, scheduler) for i in range(int(np.prod(shape)))]

    @property
    def is_of_launch(self) -> bool:
        """Whether `kernel.launch` made it, for its start and its end, and not the kernel."""
        return self.early or self.name in _OF_LAUNCH

    def name_of(self, index: int) -> str:
        """What reports call an element, as those of GPUs do (`memory/mailbox.py`)."""
        place = np.unravel_index(index, self.shape) if self.shape else ()
        return self.name + "".join(f"[{i}]" for i in place)
