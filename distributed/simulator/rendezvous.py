"""Collects the calls of all devices of a mesh; the last one starts the launch for all."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from stretto.distributed.simulator.reports.errors import RendezvousError

if TYPE_CHECKING:
    from stretto.distributed.private_jax.callbacks import Visit

type Launch = Callable[[int, list[list[Any]]], list[list[Any]]]


class Activity:
    """The time without progress in a simulation: no device arrived, no launch ran."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running = 0
        self._last = time.monotonic()

    def note(self, *, started: int = 0) -> None:
        """Something has happened; `started` is 1 where a launch starts, -1 where it ends."""
        with self._lock:
            self._running += started
            self._last = time.monotonic()

    def quiet_seconds(self) -> float:
        """Seconds since something happened."""
        with self._lock:
            return 0.0 if self._running else time.monotonic() - self._last


class _Meeting:
    """One launch: the devices that have arrived, and the error if one did not."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.visits: dict[int, Visit] = {}
        self.error: RendezvousError | None = None
        self.timer: threading.Timer | None = None


class Rendezvous:
    """The meetings of one kernel call.

    Nobody waits in a meeting: a device leaves its operands, and its program goes on once the launch
    is over. So no thread that the others need is ever held, however few XLA has. The last device
    to come starts the launch in a thread of its own, and each device goes on in one of its own.

    A meeting is known by the run of the program and the place of the call in it. A device is at a
    place once at a time, so whoever comes there next belongs to the same turn of a loop.

    Args:
      name: of the kernel.
      num_devices: the number of devices that must arrive.
      describe: a device in words.
      launch: runs the kernel, from the number of the launch at its place and the operands of all
        devices to their results.
      failed: called with the error of a launch, before any device gets it.
      timeout: seconds without any activity after which a device that is missing is given up.
      activity: of the whole simulation.
    """

    def __init__(
        self,
        name: str,
        num_devices: int,
        describe: Callable[[int], str],
        launch: Launch,
        failed: Callable[[BaseException], None],
        *,
        timeout: float,
        activity: Activity,
    ):
        self._name = name
        self._num_devices = num_devices
        self._describe = describe
        self._launch = launch
        self._failed = failed
        self._timeout = timeout
        self._activity = activity
        self._lock = threading.Lock()
        self._numbers: Counter[int] = Counter()
        self._meetings: dict[tuple[int, int], _Meeting] = {}

    def come(self, device: int, visit: Visit) -> None:
        """`device` arrives with its operands; returns at once."""
        self._activity.note()
        place = (visit.run, visit.site)
        with self._lock:
            meeting = self._meetings.get(place)
            if meeting is None:
                meeting = self._meetings[place] = _Meeting(self._numbers[visit.site])
                self._numbers[visit.site] += 1
                self._watch(meeting, self._timeout)
            meeting.visits[device] = visit
            is_complete = len(meeting.visits) == self._num_devices and meeting.error is None
            if is_complete:
                del self._meetings[place]
        if meeting.error is not None:
            visit.fail(meeting.error)
        elif is_complete:
            if meeting.timer is not None:
                meeting.timer.cancel()
            threading.Thread(target=self._run, args=(meeting,), daemon=True).start()

    def _run(self, meeting: _Meeting) -> None:
        visits = [meeting.visits[d] for d in range(self._num_devices)]
        self._activity.note(started=1)
        try:
            results = self._launch(meeting.number, [visit.operands for visit in visits])
        except BaseException as error:
            self._fail(visits, error)
            return
        finally:
            self._activity.note(started=-1)
        *others, own = list(zip(visits, results, strict=True))
        for visit, values in others:
            threading.Thread(target=visit.leave, args=(values,), daemon=True).start()
        own[0].leave(own[1])

    def _watch(self, meeting: _Meeting, seconds: float) -> None:
        if self._num_devices > 1:
            meeting.timer = threading.Timer(seconds, self._late, (meeting,))
            meeting.timer.daemon = True
            meeting.timer.start()

    def _late(self, meeting: _Meeting) -> None:
        """Called when a meeting has lasted for the timeout, or a while longer."""
        with self._lock:
            if len(meeting.visits) == self._num_devices:
                return
            left = self._timeout - self._activity.quiet_seconds()
            if left > 0:
                self._watch(meeting, left)
                return
            missing = [d for d in range(self._num_devices) if d not in meeting.visits]
            present = list(meeting.visits.values())
            meeting.error = RendezvousError(
                f"kernel {self._name}: {', '.join(map(self._describe, missing))} did not come to"
                f" it within {self._timeout:g} s, while {len(present)} of {self._num_devices}"
                " devices wait. Every device of the mesh must launch the same kernels in the same"
                " order; a branch on a value that differs between devices breaks that. So does"
                " another thread of this process that starts programs faster than they run."
            )
        self._fail(present, meeting.error)

    def _fail(self, visits: list[Visit], error: BaseException) -> None:
        self._failed(error)
        for visit in visits:
            visit.fail(error)
