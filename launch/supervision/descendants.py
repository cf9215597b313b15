"""What a process has started, and what that started: found and ended, however it hid (Linux).

A program that starts another in a session of its own is out of reach of signals to its group. It
stays a descendant of the nearest process above it that adopts orphans.
"""

import contextlib
import ctypes
import os
import signal
import sys
import time
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_ROUNDS = 20
_ROUND_S = 0.01


def adopt_orphans() -> None:
    """From now on what descends from this process stays below it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def of(ancestor: int) -> list[int]:
    """The processes below one, dead ones left out."""
    found, unseen = [], [ancestor]
    while unseen:
        below = _children(unseen.pop())
        if below is None:
            return _by_all_processes(ancestor)
        found += [pid for pid in below if _is_alive(pid)]
        unseen += below
    return found


def _children(pid: int) -> list[int] | None:
    """The children of all threads of a process; None where the kernel does not list them."""
    own = Path(f"/proc/{pid}/task")
    found = []
    with contextlib.suppress(OSError):  # it has ended
        for thread in os.listdir(own):
            try:
                found += map(int, (own / thread / "children").read_text().split())
            except FileNotFoundError:
                if (own / thread).exists():
                    return None
    return found


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def _by_all_processes(ancestor: int) -> list[int]:
    """The same, by a look at every process of the machine."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            if state not in "ZX":
                children.setdefault(int(parent), []).append(int(folder.name))
    found, unseen = [], [ancestor]
    while unseen:
        below = children.get(unseen.pop(), [])
        found += below
        unseen += below
    return found


def kill_all() -> None:
    """SIGKILL for everything below this process, and what that starts in the meantime."""
    was_empty = False
    for _ in range(_ROUNDS):
        below = of(os.getpid())
        if not below and was_empty:
            return
        # Twice: where one ends during a look, the kernel may leave out another.
        was_empty = not below
        for pid in below:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if below:
            time.sleep(_ROUND_S)
