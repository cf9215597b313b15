"""What a job's processes write: on the terminal with a prefix a line, and a file a process.

Nothing here waits for a reader or a disk but ``drain`` and ``close``, which have limits of time.
"""

import contextlib
import errno
import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from stretto.launch.supervision.logs import Logs
from stretto.launch.supervision.outlet import (
    STREAMS,
    Outlet,
    Piece,
    write_all,
    write_what_goes,
)
from stretto.launch.supervision.page import Page

_TAIL_LINES = 30
_TAIL_BYTES = 32 << 10
_CLOSE_LIMIT_S = 2.0
_FDS = {"stdout": 1, "stderr": 2}
# What gloo, which carries JAX's collectives between CPU processes, says of each when it starts.
_CONNECTED = re.compile(rb"\[Gloo\] Rank \d+ is connected to \d+ peer ranks\.")


class Console:
    """Prints lines as ``[process_id] text`` and keeps what a report may need.

    Args:
      num_processes: how many there are; sets the width of the prefix.
      log_dir: where ``process-K.log`` files go, or None for no files.
      attempt: 0, or the number of the restart, which then is part of the file name.
      tee: the processes to print, all if None; the files hold all of them.
    """

    def __init__(
        self,
        num_processes: int,
        log_dir: Path | None,
        attempt: int = 0,
        tee: frozenset[int] | None = None,
    ):
        self._logs = Logs(log_dir, attempt, self.say) if log_dir is not None else None
        self._terminal = _Terminal(len(str(num_processes - 1)), tee)
        self._tails: dict[int, bytearray] = {}
        self._unsaid: list[str] = []
        self._wake: Callable[[], None] = lambda: None
        self._outlets = [Outlet(self._terminal.write, self._terminal.write_due, self._woken)]
        if self._logs is not None:
            self._outlets.append(Outlet(self._logs.write, self._logs.write_due, self._woken))

    def output(self, process_id: int, stream: str, data: bytes) -> None:
        """Some of a process's ``stdout`` or ``stderr``, passed on byte for byte.

        That the processes of a CPU job have found each other is in the log files only.
        """
        if stream == "stderr":
            tail = self._tails.setdefault(process_id, bytearray())
            tail += data
            del tail[:-_TAIL_BYTES]
        for outlet in self._outlets:
            outlet.put(Piece(process_id, stream, data))

    def end(self, process_id: int) -> None:
        """A process writes no more: its last lines are complete."""
        for outlet in self._outlets:
            for stream in STREAMS:
                outlet.put(Piece(process_id, stream, None))

    def taken(self, process_id: int) -> int:
        """The cost of the process's output that is on the terminal and in its log file."""
        return min(outlet.taken.get(process_id, 0) for outlet in self._outlets)

    def newly_taken(self) -> set[int]:
        """The processes for which ``taken`` may have grown since this was last asked."""
        return {process_id for outlet in self._outlets for process_id in outlet.newly_taken()}

    def on_taken(self, wake: Callable[[], None]) -> None:
        """Have `wake` called, by other threads, when ``taken`` may have grown."""
        self._wake = wake

    def check(self) -> None:
        """Raises ``BrokenPipeError`` if the reader of the output is gone.

        Raises any other error of an outlet's thread, too: a fault of the launcher, not of the job.
        """
        for error in (self._terminal.error, *(outlet.error for outlet in self._outlets)):
            if error is not None:
                raise error

    def log_note(self, process_id: int) -> str:
        """``; log: FILE`` if there is one, else nothing."""
        file = self._logs.file_of(process_id) if self._logs is not None else None
        return f"; log: {file}" if file is not None else ""

    def stderr_tail(self, process_id: int) -> list[str]:
        """The last lines a process wrote to stderr."""
        text = self._tails.get(process_id, b"").decode("utf-8", "surrogateescape")
        return text.splitlines()[-_TAIL_LINES:]

    def say(self, text: str) -> None:
        """A message of the launcher's own, to stderr, after all that was written before."""
        self._unsaid.append(text)
        self._outlets[0].put(self._say_next)

    def drain(self, limit_s: float) -> bool:
        """Whether all is written within ``limit_s`` seconds."""
        until = time.monotonic() + limit_s
        return all(outlet.wait(max(0.0, until - time.monotonic())) for outlet in self._outlets)

    def close(self, *, in_haste: bool = False) -> None:
        """Let what is left be written, as long as its reader takes; ``in_haste`` for a moment only.

        The launcher's own messages are then written as far as possible.
        """
        while not self.drain(_CLOSE_LIMIT_S) and not in_haste:
            pass
        for error in filter(None, (outlet.error for outlet in self._outlets)):
            self._unsaid.append(f"stretto: some output was lost: {error!r}")
        if self._unsaid:
            with contextlib.suppress(OSError):
                write_what_goes(_FDS["stderr"], _lines(*self._unsaid))
        if self._logs is not None:
            self._outlets[-1].put(self._logs.close)
        for outlet in self._outlets:
            outlet.end()

    def _woken(self) -> None:
        self._wake()

    def _say_next(self) -> None:
        try:
            self._terminal.say(_lines(self._unsaid[0]))
        finally:
            del self._unsaid[0]


class _Terminal:
    """Standard output and error, of which each may be the other one, too."""

    def __init__(self, width: int, tee: frozenset[int] | None):
        self._width = width
        self._tee = tee
        out, error = Page(_is_hidden), Page(_is_hidden)
        self._pages = {"stdout": out, "stderr": out if _are_one_file() else error}
        self._draft: list[tuple[str, bytes]] = []
        self._has_told = False
        self.error: BrokenPipeError | None = None

    def write(self, pieces: Sequence[Piece], now: float) -> None:
        """Write the pieces on their streams."""
        for piece in pieces:
            if self._tee is not None and piece.process_id not in self._tee:
                continue
            page, name = self._pages[piece.stream], (piece.process_id, piece.stream)
            prefix = f"[{piece.process_id:>{self._width}}] ".encode()
            data = piece.data
            shown = page.end(name) if data is None else page.add(name, prefix, data, now)
            self._draft.append((piece.stream, shown))
        self._write_draft()

    def write_due(self, now: float) -> bool:
        """Show lines whose source has paused; whether more are held back."""
        self._draft += [(stream, page.due(now)) for stream, page in self._pages.items()]
        self._write_draft()
        return any(page.holds_back for page in self._pages.values())

    def say(self, text: bytes) -> None:
        """Write lines of the launcher's own on stderr."""
        self._draft += [(stream, page.close_line()) for stream, page in self._pages.items()]
        self._draft.append(("stderr", text))
        self._write_draft()

    def _write_draft(self) -> None:
        parts, self._draft = self._draft, []
        while parts:
            stream, data = parts[0][0], bytearray()
            while parts and parts[0][0] == stream:
                data += parts.pop(0)[1]
            try:
                write_all(_FDS[stream], bytes(data))
            except BrokenPipeError as error:
                self.error = error
            except OSError as error:  # a stream that was closed, a full disk
                parts += self._told_of(stream, error)

    def _told_of(self, stream: str, error: OSError) -> list[tuple[str, bytes]]:
        """What to write of a stream that cannot be written: once, and not of a closed one."""
        if self._has_told or stream == "stderr" or error.errno == errno.EBADF:
            return []
        self._has_told = True
        reason = f"stdout cannot be written ({error.strerror})"
        text = f"stretto: {reason}; the job continues, its output has gaps"
        return [("stderr", _lines(text))]


def _is_hidden(line: bytes) -> bool:
    return _CONNECTED.match(line) is not None


def _lines(*texts: str) -> bytes:
    return b"".join(_encoded(text) + b"\n" for text in texts)


def _encoded(text: str) -> bytes:
    """Bytes that came as ``surrogateescape`` as they were; other surrogates as ``\\ud800``."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "backslashreplace")


def _are_one_file() -> bool:
    try:
        out, error = (os.fstat(fd) for fd in _FDS.values())
    except OSError:
        return False
    return (out.st_dev, out.st_ino) == (error.st_dev, error.st_ino)
