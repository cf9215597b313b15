"""Bulk copies between global and shared memory: the TMA engine, which lands them later."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import numpy as np

from stretto.distributed.simulator.state import clocks
from stretto.distributed.simulator.state.barriers import Barrier
from stretto.distributed.simulator.state.memory import Region
from stretto.distributed.simulator.state.races import Access
from stretto.distributed.simulator.state.reductions import REDUCTIONS
from stretto.distributed.simulator.state.waiting import wake
from stretto.distributed.sites import Site


class Copy:
    """A copy that a task has issued. It runs as a task of its own, and reads before it writes.

    Attributes:
      issuer: the task that issued it.
      site: where.
      destination: where it goes.
      waited: how many semaphores the issuer had waited for.
      reading, writing: (timeline, value) of its read and of its write.
      read_done, write_done: how far it is.
    """

    __slots__ = (
        "_clock", "body", "destination", "issuer", "polled", "priority", "read_done", "reading",
        "site", "time", "waited", "waiters", "waiting", "write_done", "writing",
    )  # fmt: skip

    def __init__(self, issuer: Any, site: Site, destination: Region):
        self.issuer = issuer
        self.site = site
        self.destination = destination
        self.waited = issuer.waits.count
        clock = issuer.clock
        self.reading = issuer.asyncs.start(clock)
        self._clock = clocks.advance(issuer.release(), *self.reading)
        # The same timeline again, one further: the write comes after the read.
        self.writing = issuer.asyncs.start(self._clock)
        self._clock = clocks.advance(self._clock, *self.writing)
        self.read_done = False
        self.write_done = False
        self.waiters: list[Any] = []
        self.waiting: Any = None
        self.polled = False
        self.priority: float | None = None
        self.time = issuer.time
        self.body: Generator[Any, None, Any]

    def start(self, body: Generator) -> None:
        """Hands the copy to the scheduler."""
        self.body = body
        machine = self.issuer.machine
        machine.report.statistics.copies += 1
        machine.scheduler.push(self)

    def access(self, what: str, place: tuple[int, int], atomic: str | None = None) -> Access:
        """An access to memory that the copy does now."""
        device = self.issuer.device.index
        return Access(
            what, self, self.site, device, self._clock, *place, atomic=atomic, is_async=True
        )

    def check_commit(self, region: Region, *, writes: bool) -> None:
        """Checks, as the copy is issued, that its part of shared memory has been committed."""
        if writes:
            access = self.access("copy's write", self.writing)
        else:
            access = self.access("copy's read", self.reading)
        self.issuer.machine.checks.committed(region, access, self.issuer.committed)

    def mark_read(self) -> None:
        """The source has been read."""
        self.read_done = True
        wake(self, self.issuer.machine.scheduler)

    def mark_written(self) -> None:
        """The destination has been written."""
        self.write_done = True
        wake(self, self.issuer.machine.scheduler)

    def finish(self) -> None:
        """Called once, when the body has ended."""
        self._clock = clocks.empty()  # Reports refer to the copy for long; its clock is large.

    def place(self) -> tuple[int, str]:
        """Its device and its row in a trace."""
        return self.issuer.device.index, f"copies of {self.issuer.describe()}"

    def describe(self) -> str:
        """The copy in words."""
        return f"the copy to {self.destination.describe()} issued by {self.issuer.describe()}"


def store_body(
    copy: Copy, source: Region, targets: list[tuple[Region, Any]], reduction: str | None
) -> Generator:
    """Runs a copy from shared to global memory.

    Args:
      copy: the copy.
      source: region of shared memory.
      targets: regions of global memory, each with the index of the part of the source that goes
        there (None: all of it).
      reduction: how the source is combined with what is there; None to overwrite it.
    """
    machine = copy.issuer.machine
    yield
    machine.detector.read(source, copy.access("copy's read", copy.reading))
    data = np.array(source.get())
    begin = machine.now(copy)
    copy.mark_read()
    yield
    for target, part in targets:
        piece = data if part is None else data[part]
        atomic = None if reduction is None else "sys"
        what = "copy's write" if reduction is None else "copy's reduction"
        access = copy.access(what, copy.writing, atomic)
        machine.detector.write(target, access)
        machine.touch(target.buffer.device, access)
        if reduction is not None:
            piece = REDUCTIONS[reduction](target.get(), piece)
        target.set(piece)
        machine.count_copy(copy.issuer.device.index, target.buffer.device, piece.nbytes)
        copy.time = machine.cost.copy_end(
            copy.time, copy.issuer.device.index, target.buffer.device, piece.nbytes
        )
    machine.note(copy, f"copy to {copy.destination.describe()}", begin)
    copy.mark_written()


def load_body(
    copy: Copy,
    source: Region,
    fill: tuple | None,
    targets: list[tuple[Region, Barrier]],
    num_bytes: int,
    select: Callable[[np.ndarray], np.ndarray] | None = None,
) -> Generator:
    """Runs a copy from global to shared memory.

    Args:
      copy: the copy.
      source: region of global memory.
      fill: None, or (shape of the whole, index of the source in it): the rest is filled with zeros.
      targets: regions of shared memory, each with the barrier that learns of the arrival.
      num_bytes: the bytes that arrive at the barriers.
      select: takes the part that the targets get out of the whole, zeros included.
    """
    machine = copy.issuer.machine
    yield
    machine.detector.read(source, copy.access("copy's read", copy.reading))
    machine.touch(source.buffer.device, copy.access("copy's read", copy.reading))
    data = np.array(source.get())
    if fill is not None:
        whole = np.zeros(fill[0], data.dtype)
        whole[fill[1]] = data.reshape(whole[fill[1]].shape)
        data = whole
    if select is not None:
        data = select(data)
    begin = machine.now(copy)
    copy.mark_read()
    yield
    copy.time = machine.cost.copy_end(
        copy.time, source.buffer.device, copy.issuer.device.index, data.nbytes
    )
    machine.count_copy(source.buffer.device, copy.issuer.device.index, data.nbytes)
    for target, _ in targets:
        machine.detector.write(target, copy.access("copy's write", copy.writing))
        target.set(data.reshape(target.get().shape))
    machine.note(copy, f"copy to {copy.destination.describe()}", begin)
    copy.mark_written()
    for _, barrier in targets:
        barrier.land(num_bytes, copy.writing, copy.time)
