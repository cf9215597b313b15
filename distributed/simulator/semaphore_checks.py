"""Checks of semaphores that are used against their nature."""

from __future__ import annotations

from typing import Any

from stretto.distributed.simulator.reports.report import Finding
from stretto.distributed.simulator.state.races import Access
from stretto.distributed.simulator.state.semaphores import Semaphore
from stretto.distributed.sites import Site


class SemaphoreChecks:
    """Checks of the semaphores of one launch.

    Args:
      machine: the launch.
      of_hardware: report what no GPU does.
    """

    def __init__(self, machine: Any, of_hardware: bool):
        self._machine = machine
        self.of_hardware = of_hardware
        self._report = machine.report
        self._on = machine.detector.detect_races

    def _find(self, kind: str, message: str, *sites: Site, name: str = "") -> None:
        self._report.add(Finding(kind=kind, key=(kind, *sites, name), message=message, sites=sites))

    def narrow_signal(self, semaphore: Semaphore, task: Any, site: Site) -> None:
        """A signal of scope "gpu" goes to another device."""
        self._find(
            "semaphore scope",
            f"{task.describe()} signals {semaphore.name} of device {semaphore.device} in scope"
            f' "gpu" at {site}, which says nothing to another device. Use scope "sys".',
            site,
        )

    def atomic_touch(self, semaphore: Semaphore, access: Access) -> None:
        """A signal, a wait or a read of a semaphore."""
        if not self._on:
            return
        if semaphore.store is not None and not semaphore.store.before(access):
            self._store_race(semaphore, semaphore.store, access)
        semaphore.touches[access.timeline] = access

    def plain_store(self, semaphore: Semaphore, task: Any, site: Site) -> None:
        """A plain store to a semaphore."""
        if not self._on:
            return
        store = task.access("plain store", site)
        for access in semaphore.touches.values():
            if not access.before(store):
                self._store_race(semaphore, access, store)
        semaphore.store = store
        self._machine.touch(semaphore.device, store)

    def persistent_wait(self, semaphore: Semaphore, access: Access, *, decrement: bool) -> None:
        """A wait for a persistent semaphore, which the next launch may find signalled already.

        A decrement must be ordered after all waits that look for the same signal.
        """
        if not self._on:
            return
        others = semaphore.looks if decrement else semaphore.takes
        for other in others:
            if other.timeline != access.timeline and not (decrement and other.before(access)):
                look, take = (other, access) if decrement else (access, other)
                self._find(
                    "race",
                    f"race on semaphore {semaphore.name} of device {semaphore.device}:\n"
                    f"  {look.describe()}\n  {take.describe()}\n"
                    "  The second takes off what the first waits for, and may come before it.",
                    look.site,
                    take.site,
                    name=semaphore.name,
                )
        if not decrement:
            semaphore.looks.append(access)

    def taking_wait(self, semaphore: Semaphore, access: Access) -> None:
        """A bounded wait with decrement, which subtracts without looking again."""
        if not self._on:
            return
        for other in semaphore.takes:
            if other.timeline != access.timeline and not other.before(access):
                self._find(
                    "race",
                    f"race on semaphore {semaphore.name} of device {semaphore.device}:\n"
                    f"  {other.describe()}\n  {access.describe()}\n"
                    "  Both may see the same count and subtract it. With decrement=True only one"
                    " warp or warpgroup at a time may wait for a semaphore.",
                    other.site,
                    access.site,
                    name=semaphore.name,
                )
        semaphore.takes.append(access)

    def _store_race(self, semaphore: Semaphore, first: Access, second: Access) -> None:
        self._find(
            "race",
            f"race on semaphore {semaphore.name} of device {semaphore.device}:\n"
            f"  {first.describe()}\n  {second.describe()}\n"
            "  A plain store can undo a signal that lands just before it. Take back what was"
            " waited for with semaphore_wait(decrement=True) instead.",
            first.site,
            second.site,
            name=semaphore.name,
        )

    def left_over(self, semaphore: Semaphore) -> None:
        """A semaphore is not zero at the end that should be."""
        sites = tuple(sorted({s for *_, s in semaphore.signalled_by}, key=str))
        lines = "; ".join(map(str, sites))
        what = _HARMLESS
        if semaphore.persistent:
            what = f"{_IN_HEAP} {_OF_HANDSHAKE if semaphore.early else _RESTORED}"
        self._report.add(
            Finding(
                kind="semaphore not zero",
                key=("semaphore not zero", sites, semaphore.name.split("[")[0]),
                message=(
                    f"semaphore {semaphore.name} of device {semaphore.device} ends at"
                    f" {semaphore.value}, raised at {lines}. {what}"
                ),
                sites=sites,
                is_warning=not semaphore.persistent,
            )
        )


_IN_HEAP = "It lies in the heap, where the next launch will find it so and take it for its own."
_OF_HANDSHAKE = (
    "Was handshake.wait_at_end() left out, or do more or fewer warps call handshake.wait() than"
    " waiting_warps says?"
)
_RESTORED = "A kernel waits with decrement=True for all signals of its restored semaphores."
_HARMLESS = (
    "XLA zeroes semaphores before each launch, so this is harmless as long as they do not outlive"
    " the kernel."
)
