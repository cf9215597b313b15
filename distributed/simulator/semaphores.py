"""Semaphores: counters in global memory that any device may raise."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from stretto.distributed.simulator.barriers import id_buffer
from stretto.distributed.simulator.clocks import Clock, empty, join
from stretto.distributed.simulator.races import Access
from stretto.distributed.simulator.sites import Site
from stretto.distributed.simulator.waiting import wake


class Semaphore:
    """One counter, and what its signals carry.

    A signal releases what its task knows, and a wait takes it over, if each is in a scope that the
    other is in too: both "sys", or both on one device. Signals add to what a wait finds, because an
    atomic update of a counter continues the release of those before it.

    Attributes:
      name: what reports call it.
      device: linear index of the device that owns it.
      value: the count.
      signalled_by: how often each (who, site) has raised it.
      touches: the last atomic access of each timeline, for the check of plain stores.
      store: the last plain store.
    """

    __slots__ = (
        "_by_device", "_sys", "device", "name", "scheduler", "signalled_by", "store", "time",
        "touches", "value", "waiters",
    )  # fmt: skip

    def __init__(self, name: str, device: int, scheduler: Any):
        self.name = name
        self.device = device
        self.value = 0
        self._sys: Clock = empty()
        self._by_device: dict[int, Clock] = {}
        self.waiters: list = []
        self.scheduler = scheduler
        self.signalled_by: Counter[tuple[str, Site]] = Counter()
        self.touches: dict[int, Access] = {}
        self.store: Access | None = None
        self.time = 0.0

    def signal(self, amount: int, clock: Clock | None, device: int, scope: str, time: float) -> None:
        """Adds `amount`, by a task on `device` that knows `clock` (None: a relaxed signal)."""
        self.value += amount
        if clock is not None:
            if scope == "sys":
                self._sys = join(self._sys, clock)
            mine = self._by_device.get(device)
            self._by_device[device] = clock.copy() if mine is None else join(mine, clock)
        self.time = max(self.time, time)
        wake(self, self.scheduler)

    def carried(self, device: int, scope: str) -> list[Clock]:
        """The clocks that a wait by a task on `device` takes over."""
        out = [self._sys] if scope == "sys" else []
        if device in self._by_device:
            out.append(self._by_device[device])
        return out


class SemaphoreArray:
    """An array of semaphores, as one allocation makes it on one device."""

    def __init__(self, name: str, shape: tuple[int, ...], device: int, scheduler: Any, key: Any):
        count = int(np.prod(shape))
        self.name = name
        self.items = [
            Semaphore(name if not shape else f"{name}[{i}]", device, scheduler)
            for i in range(count)
        ]
        self.device = device
        self.key = key
        self.ids = id_buffer(name, shape)
