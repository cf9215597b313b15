"""Where the devices of a mesh meet: each brings its operands, the last runs the launch for all."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from stretto.distributed.simulator.errors import RendezvousError


class _Meeting:
    """One launch: who has come, and what came of it."""

    def __init__(self) -> None:
        self.operands: dict[int, list] = {}
        self.results: list[list] | None = None
        self.error: BaseException | None = None
        self.running = False

    @property
    def is_over(self) -> bool:
        return self.results is not None or self.error is not None


class Rendezvous:
    """The meetings of one kernel call.

    XLA runs each device of a program in a thread of its own, and a callback holds that thread; it
    has at least one for each device, so all can wait here. A device takes part in the launches of
    one call in order, so its n-th visit belongs to the n-th meeting.

    Args:
      name: of the kernel.
      num_devices: how many must come.
      describe: a device in words.
    """

    def __init__(self, name: str, num_devices: int, describe: Callable[[int], str]):
        self._name = name
        self._num_devices = num_devices
        self._describe = describe
        self._changed = threading.Condition()
        self._visits = [0] * num_devices
        self._meetings: dict[int, _Meeting] = {}

    def meet(
        self,
        device: int,
        operands: list[Any],
        run: Callable[[int, list[list[Any]]], list[list[Any]]],
        timeout: float,
    ) -> list[Any]:
        """Brings `operands` of `device`, and returns its results.

        Args:
          device: who comes.
          operands: what it brings.
          run: called once, by the last to come, with the number of the meeting and the operands of
            all devices.
          timeout: seconds to wait for the others to come (running does not count).

        Raises:
          RendezvousError: somebody did not come in time.
          Exception: what `run` raised, on every device.
        """
        with self._changed:
            number = self._visits[device]
            self._visits[device] += 1
            meeting = self._meetings.setdefault(number, _Meeting())
            meeting.operands[device] = operands
            is_last = len(meeting.operands) == self._num_devices and meeting.error is None
            if is_last:
                meeting.running = True
        if is_last:
            self._run(meeting, lambda operands: run(number, operands))
        with self._changed:
            self._changed.wait_for(lambda: meeting.is_over or meeting.running, timeout)
            if not meeting.is_over and not meeting.running:
                self._give_up(meeting, timeout)
            self._changed.wait_for(lambda: meeting.is_over)
            self._meetings.pop(number, None) if self._all_left(number) else None
        if meeting.error is not None:
            raise meeting.error
        return meeting.results[device] if meeting.results is not None else []

    def _run(self, meeting: _Meeting, run: Callable) -> None:
        results, error = None, None
        try:
            results = run([meeting.operands[d] for d in range(self._num_devices)])
        except BaseException as caught:
            error = caught
        with self._changed:
            meeting.results, meeting.error = results, error
            self._changed.notify_all()

    def _give_up(self, meeting: _Meeting, timeout: float) -> None:
        missing = [d for d in range(self._num_devices) if d not in meeting.operands]
        meeting.error = RendezvousError(
            f"kernel {self._name}: {', '.join(map(self._describe, missing))} did not come to it"
            f" within {timeout:g} s, while {len(meeting.operands)} of {self._num_devices} devices"
            " wait. Every device of the mesh must launch the same kernels in the same order; a"
            " branch on a value that differs between devices breaks that."
        )
        self._changed.notify_all()

    def _all_left(self, number: int) -> bool:
        return all(v > number for v in self._visits)
