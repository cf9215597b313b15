"""What a job's processes write: on the terminal with a prefix a line, and a file a process."""

import re
import sys
from collections import deque
from pathlib import Path
from typing import BinaryIO

_TAIL_LINES = 30
# What gloo, which carries JAX's collectives between CPU processes, says of each when it starts.
_CONNECTED = re.compile(r"\[Gloo\] Rank \d+ is connected to \d+ peer ranks\.")


class Console:
    """Prints lines as ``[process_id] text`` and keeps what a report may need.

    Args:
      num_processes: how many there are; sets the width of the prefix.
      log_dir: where ``process-K.log`` files go, or None for no files.
      attempt: 0, or the number of the restart, which then is part of the file name.
    """

    def __init__(self, num_processes: int, log_dir: Path | None, attempt: int = 0):
        self._width = len(str(num_processes - 1))
        self._log_dir = log_dir
        self._suffix = f".restart{attempt}.log" if attempt else ".log"
        self._logs: dict[int, BinaryIO] = {}
        self._tails: dict[int, deque[str]] = {}
        if log_dir is not None:
            log_dir.mkdir(parents=True, exist_ok=True)

    def line(self, process_id: int, stream: str, text: str) -> None:
        """One line of a process's ``stdout`` or ``stderr``, passed on byte for byte.

        That the processes of a CPU job have found each other is in the log files only.
        """
        data = text.encode("utf-8", "surrogateescape") + b"\n"
        if not _CONNECTED.match(text):
            out = sys.stdout if stream == "stdout" else sys.stderr
            out.flush()
            out.buffer.write(f"[{process_id:>{self._width}}] ".encode() + data)
            out.buffer.flush()
        if stream == "stderr":
            self._tails.setdefault(process_id, deque(maxlen=_TAIL_LINES)).append(text)
        if self._log_dir is not None:
            if process_id not in self._logs:
                self._logs[process_id] = self.log_file(process_id).open("wb")
            self._logs[process_id].write(data)
            self._logs[process_id].flush()

    def log_file(self, process_id: int) -> Path:
        """The file that holds a process's output."""
        return (self._log_dir or Path()) / f"process-{process_id}{self._suffix}"

    def log_note(self, process_id: int) -> str:
        """``; log: FILE`` if there is one, else nothing."""
        return f"; log: {self.log_file(process_id)}" if process_id in self._logs else ""

    def stderr_tail(self, process_id: int) -> list[str]:
        """The last lines a process wrote to stderr."""
        return list(self._tails.get(process_id, ()))

    def say(self, text: str) -> None:
        """A message of the launcher's own, to stderr."""
        sys.stdout.flush()
        print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Close the log files."""
        for log in self._logs.values():
            log.close()
