"""Whether a process is idle, as in a wait for others in a collective.

Its main thread then waits for another thread, and the process computes nothing. A process that
sleeps, reads a file, compiles, or waits for a program that it started is not idle. On GPUs JAX may
spin while it waits, so whether a process computes shows nothing there.
"""

import os
import platform
from dataclasses import dataclass
from pathlib import Path

# The system call by which a thread waits for another one.
_FUTEX = {"x86_64": "202", "aarch64": "98"}.get(platform.machine(), "")
_LEAST_INTERVAL_S = 0.3
_BUSY = 0.1


@dataclass(frozen=True)
class Look:
    """What a look at a process saw: seconds of CPU time so far, and what its main thread does.

    ``waits`` and ``runs``: for another thread; in user code. Neither: in another system call.
    """

    cpu_s: float
    waits: bool
    runs: bool


def look(pid: int) -> Look | None:
    """Look at a process of this host; None where that is not allowed, or not known how."""
    try:
        call = Path(f"/proc/{pid}/syscall").read_text().split()[0]
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, IndexError):
        return None
    if not _FUTEX:
        return None
    ticks = sum(map(int, fields[11:15]))  # its own, and of children that have ended
    return Look(ticks / os.sysconf("SC_CLK_TCK"), call == _FUTEX, call == "running")


class Stillness:
    """What the looks at one process say together.

    Args:
      spins: whether a process that waits may compute all the while.
    """

    def __init__(self, *, spins: bool):
        self._spins = spins
        self._last: tuple[float, Look] | None = None
        self.since: float | None = None
        """Since when it has stood still; None if it did not when last looked at."""

    def add(self, seen: Look | None, now: float) -> None:
        """Take in a look; where none is possible, the process counts as still."""
        if seen is None:
            self.since = now if self.since is None else self.since
            return
        if self._last is not None and now < self._last[0] + _LEAST_INTERVAL_S:
            return
        if not self._is_still(seen, now):
            self.since = None
        elif self.since is None:
            self.since = now
        self._last = now, seen

    def _is_still(self, seen: Look, now: float) -> bool:
        if self._spins:
            return seen.waits or seen.runs
        if not seen.waits or self._last is None:
            return False
        then, before = self._last
        return seen.cpu_s - before.cpu_s < _BUSY * (now - then)
