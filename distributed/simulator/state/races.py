"""Data races: two accesses to an element, one of them a write, that nothing puts in an order.

For each element the detector keeps the last write and the reads since it (as FastTrack does), and
compares their place on their timelines with the clock of each new access. Elements, not ranges: a
strided or an empty slice is exactly the elements it names.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from stretto.distributed.simulator.reports import accesses
from stretto.distributed.simulator.reports.report import Finding, Report
from stretto.distributed.simulator.state import peers
from stretto.distributed.simulator.state.clocks import Clock, knows
from stretto.distributed.simulator.state.freed import in_heirs
from stretto.distributed.simulator.state.memory import INITIAL, UNWRITTEN, Region
from stretto.distributed.sites import Site


@dataclass(slots=True)
class Access:
    """One access to memory.

    Attributes:
      what: "read", "write", "copy's read" and so on, for reports.
      who: the task or the copy, which can `describe()` itself.
      site: where it is written.
      device: linear index of the device that did it.
      clock: what was known when it was done; only valid while it is checked.
      timeline, value: its place.
      atomic: it is atomic towards other atomic accesses; "gpu" only those of its own device.
      is_async: a copy or a tensor core does it, by another path to shared memory than loads and
        stores take (PTX's asynchronous and generic proxy).
      earlier: atomic accesses not ordered with this one, which it stands for too.
      gone: it is a write to memory that its scope has given back: nobody may read what it wrote.
    """

    what: str
    who: Any
    site: Site
    device: int
    clock: Clock
    timeline: int
    value: int
    atomic: str | None = None
    is_async: bool = False
    earlier: tuple[Access, ...] = ()
    gone: bool = False

    @property
    def updates(self) -> bool:
        """Whether it is a write that combines a value with what is there."""
        return self.atomic is not None

    def before(self, other: Access) -> bool:
        """Whether this access is known to come before `other`."""
        return knows(other.clock, self.timeline, self.value)

    def agrees_with(self, other: Access) -> bool:
        """Whether both are atomic towards each other."""
        if self.atomic is None or other.atomic is None:
            return False
        return self.device == other.device or self.atomic == other.atomic == "sys"

    def describe(self) -> str:
        """The access in words."""
        when = ", in a scope that has ended" if self.gone else ""
        return f"{self.what} by {self.who.describe()} at {self.site}{when}"


class RaceDetector:
    """Checks every access of one launch, and reports what it finds.

    Args:
      report: where findings go.
      detect_races: without it only reads of memory that nobody has written are found.

    Attributes:
      writers: for the global memory called (key, device), how often each (device, site) wrote it.
      suspects: findings that a wrong peer may have caused.
    """

    def __init__(self, report: Report, detect_races: bool):
        self.report = report
        self.detect_races = detect_races
        self._writes: list[Access | None] = [None, None]
        self._reads: list[dict[int, Access]] = [{}]
        self._gone: dict[int, int] = {}
        self._unwritten: set[tuple[Site, str]] = set()
        self.writers: dict[tuple[Any, int], Counter[tuple[int, Site]]] = {}
        self.suspects: list[peers.Suspect] = []

    def read(self, region: Region, access: Access) -> None:
        """Checks and records a read."""
        ids = region.write_ids()
        if not ids.size:
            return
        self._check_written(region, access, ids)
        for i in _distinct(ids):
            if i > INITIAL:
                self._check(self._writes[i], access, region)
        if self.detect_races:
            self._add_read(region, access)
            for part in in_heirs(region):
                self._read_late(part, access)

    def write(self, region: Region, access: Access) -> None:
        """Checks and records a write, or an atomic update."""
        ids = region.write_ids()
        if not ids.size:
            return
        if region.buffer.space == "gmem":
            whose = region.buffer.key, region.buffer.device
            self.writers.setdefault(whose, Counter())[access.device, access.site] += 1
        if access.updates:
            self._check_written(region, access, ids)
        if not self.detect_races:
            region.set_write_ids(INITIAL)
            return
        unordered: list[Access] = []
        for i in _distinct(ids):
            if i > INITIAL:
                self._check(self._writes[i], access, region, unordered)
        for i in _distinct(region.read_ids()):
            for earlier in self._reads[i].values():
                self._check(earlier, access, region)
        access.earlier = tuple(unordered)
        self._writes.append(access)
        region.set_write_ids(len(self._writes) - 1)
        for part in in_heirs(region):
            self._write_late(part, access)

    def _read_late(self, region: Region, access: Access) -> None:
        """Checks and records a read of memory that its scope has given back."""
        for i in _distinct(region.write_ids()):
            self._check(self._writes[i], access, region)
        self._add_read(region, access)

    def _write_late(self, region: Region, access: Access) -> None:
        """Checks and records a write to memory that its scope has given back."""
        for i in _distinct(region.write_ids()):
            self._check(self._writes[i], access, region)
        for i in _distinct(region.read_ids()):
            for earlier in self._reads[i].values():
                self._check(earlier, access, region)
        self._writes.append(replace(access, gone=True))
        region.set_write_ids(len(self._writes) - 1)

    def gone(self, number: int) -> int:
        """The id of the write `number` once its memory has been given back."""
        if number <= INITIAL:
            return UNWRITTEN
        access = self._writes[number]
        if access is None or access.gone:
            return number
        if number not in self._gone:
            self._writes.append(replace(access, gone=True))
            self._gone[number] = len(self._writes) - 1
        return self._gone[number]

    def _check_written(self, region: Region, access: Access, ids: np.ndarray) -> None:
        """Reports `access` if it reads what nobody has written."""
        writes = [self._writes[i] if i > INITIAL else None for i in _distinct(ids)]
        if UNWRITTEN in _distinct(ids) or any(w is not None and w.gone for w in writes):
            self._report_unwritten(region, access)

    def last_writes(self, region: Region) -> list[Access]:
        """The last writes to a region by the kernel."""
        ids = region.write_ids()
        found = [self._writes[i] for i in _distinct(ids) if i > INITIAL] if ids.size else []
        return [a for a in found if a is not None]

    def reads_since(self, region: Region) -> list[Access]:
        """The reads of a region since it was last written, but for those that others stand for."""
        ids = region.read_ids()
        return [a for i in _distinct(ids) for a in self._reads[i].values()] if ids.size else []

    def _check(
        self,
        earlier: Access | None,
        access: Access,
        region: Region,
        unordered: list[Access] | None = None,
    ) -> None:
        if earlier is None:
            return
        for one in (earlier, *earlier.earlier):
            if one.before(access):
                continue
            if one.agrees_with(access):
                if unordered is not None:
                    unordered.append(one)
                continue
            self._report_race(one, access, region)

    def _add_read(self, region: Region, access: Access) -> None:
        ids = region.read_ids()
        distinct = _distinct(ids)
        if len(distinct) == 1:
            new = self._merged(distinct[0], access)
            if new != distinct[0]:
                region.set_read_ids(new)
            return
        out = ids.copy()
        for i in distinct:
            out[ids == i] = self._merged(i, access)
        region.set_read_ids(out)

    def _merged(self, set_id: int, access: Access) -> int:
        """The id of the read set `set_id` with `access` added and what came before it dropped.

        What waits for the later one waits for the earlier one as well. But a copy that reads does
        not stand for a load before it: the next write may have to be told of that one.
        """
        old = self._reads[set_id]
        kept = {
            t: a
            for t, a in old.items()
            if t != access.timeline and not (a.is_async == access.is_async and a.before(access))
        }
        kept[access.timeline] = access
        self._reads.append(kept)
        return len(self._reads) - 1

    def _report_unwritten(self, region: Region, access: Access) -> None:
        self._unwritten.add((access.site, region.buffer.name))
        self._report(accesses.unwritten(access, region), region, None, access)

    def _report_race(self, first: Access, second: Access, region: Region) -> None:
        too_early = (first.site, region.buffer.name) in self._unwritten and "read" in first.what
        found = accesses.race(first, second, region, read_too_early=too_early)
        self._report(found, region, first, second)

    def _report(
        self, finding: Finding, region: Region, first: Access | None, second: Access
    ) -> None:
        if self.report.add(finding) and region.buffer.space == "gmem":
            self.suspects.append(peers.suspect(finding, region, first, second))


def _distinct(ids: np.ndarray) -> list[int]:
    """The distinct values of a non-empty array; almost always there is one, in few runs if not."""
    first = ids.item(0)
    if ids.size == 1 or (ids == first).all():
        return [first]
    flat = ids.reshape(-1)
    starts = np.flatnonzero(flat[1:] != flat[:-1]) + 1
    return sorted({first, *flat[starts].tolist()})
