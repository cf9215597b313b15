"""Writes output in a thread of its own, so that a slow reader or disk delays nothing else.

The console is one outlet, the log files are another. Each says how much of every process's output
it has dealt with; no process may be ahead of that by more than a ``Flow``.
"""

import contextlib
import os
import queue
import select
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stretto.launch.supervision.page import PAUSE_S
from stretto.launch.supervision.wire import cost

STREAMS = ("stdout", "stderr")
_STEP_S = PAUSE_S / 2


@dataclass(frozen=True)
class Piece:
    """Some output of a process; without data: it writes no more."""

    process_id: int
    stream: str
    data: bytes | None


class Outlet:
    """A thread that hands pieces to ``write``, in their order, and what is due to ``write_due``.

    Its time is what it has waited for pieces. While it writes, or this process is stopped, no
    source pauses: there may be more of it, which could not come. It never ends by an error, since
    everything would wait for it: it keeps the first one as ``error``, and goes on.

    Args:
      write: takes pieces and the time, and may block.
      write_due: shows what was held back and is due by now; whether more is held back.
      wake: called after some were taken.
    """

    def __init__(
        self,
        write: Callable[[Sequence[Piece], float], None],
        write_due: Callable[[float], bool],
        wake: Callable[[], None],
    ):
        self._write = write
        self._write_due = write_due
        self._wake = wake
        self._queue: queue.SimpleQueue[Piece | Callable[[], None]] = queue.SimpleQueue()
        self.taken: dict[int, int] = {}  # by process, the cost of what was dealt with
        self.error: Exception | None = None
        self._newly_taken: queue.SimpleQueue[set[int]] = queue.SimpleQueue()
        threading.Thread(target=self._serve, daemon=True).start()

    def put(self, item: Piece | Callable[[], None]) -> None:
        """Have a piece written, or a function called, after all that was put before."""
        self._queue.put(item)

    def newly_taken(self) -> set[int]:
        """The processes of which something was dealt with since this was last asked."""
        found: set[int] = set()
        with contextlib.suppress(queue.Empty):
            while True:
                found |= self._newly_taken.get_nowait()
        return found

    def wait(self, limit_s: float) -> bool:
        """Whether all that was put so far is written within ``limit_s`` seconds."""
        done = threading.Event()
        self._queue.put(done.set)
        return done.wait(limit_s)

    def _serve(self) -> None:
        holds_back, now = False, 0.0
        while True:
            began = time.monotonic()
            pieces, then = self._next(_STEP_S if holds_back else None)
            now += min(time.monotonic() - began, _STEP_S)
            self._try(self._write, pieces, now)
            for piece in pieces:
                size = cost(len(piece.data)) if piece.data is not None else 0
                self.taken[piece.process_id] = self.taken.get(piece.process_id, 0) + size
            if pieces:
                self._newly_taken.put({piece.process_id for piece in pieces})
            holds_back = bool(self._try(self._write_due, now))
            self._wake()
            if then is _END:
                return
            if then is not None:
                self._try(then)

    def _try[**P, R](self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R | None:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            self.error = self.error or error
            return None

    def end(self) -> None:
        """Have the thread end after all that was put before."""
        self.put(_END)

    def _next(self, limit_s: float | None) -> tuple[list[Piece], Callable[[], None] | None]:
        """The pieces up to a function, and it, if there is one; nothing when the time is over."""
        pieces = []
        with contextlib.suppress(queue.Empty):
            item = self._queue.get(timeout=limit_s)
            while isinstance(item, Piece):
                pieces.append(item)
                item = self._queue.get_nowait()
            return pieces, item
        return pieces, None


def _END() -> None:
    """Stands in a queue for its end."""


def write_all(fd: int, data: bytes) -> None:
    """Write all of it, also where the descriptor does not block. Raises ``OSError``."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:
            select.select([], [fd], [])


def write_what_goes(fd: int, data: bytes) -> None:
    """Write as much as goes without waiting. Raises ``OSError``."""
    view = memoryview(data)
    while view and select.select([], [fd], [], 0)[1]:
        view = view[os.write(fd, view[: select.PIPE_BUF]) :]
