"""The worker process as its agent sees it: started, read line by line, signalled, reaped."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stretto.launch import environment
from stretto.launch.process.heartbeat import RECORD_SIZE, decode

_READ_SIZE = 1 << 16
_LONGEST_LINE = 1 << 16
WORKER = Path(__file__).parents[1] / "worker.py"


@dataclass(frozen=True)
class StateChange:
    """What ``waitpid`` said: ``exited`` (status), ``killed``, ``stopped`` (signal), ``continued``.

    ``number`` is the exit status or the signal.
    """

    state: str
    number: int


class Pipe:
    """One of the worker's output pipes, cut into lines."""

    def __init__(self, name: str, fd: int):
        self.name = name
        self.fd = fd
        self._rest = b""
        os.set_blocking(fd, False)

    def fileno(self) -> int:
        """The descriptor, so that a selector takes a pipe."""
        return self.fd

    def read(self) -> tuple[list[str], bool]:
        """The lines that are complete, and whether the pipe may give more.

        A line is decoded with ``surrogateescape``; one over 64 KiB comes in pieces. What is
        left without a newline comes at the end.
        """
        try:
            data = os.read(self.fd, _READ_SIZE)
        except BlockingIOError:
            return [], True
        *lines, self._rest = (self._rest + data).split(b"\n")
        if self._rest and (not data or len(self._rest) > _LONGEST_LINE):
            lines.append(self._rest)
            self._rest = b""
        return [line.decode("utf-8", "surrogateescape") for line in lines], bool(data)

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.fd)


class Child:
    """A worker in a session of its own, so that a signal reaches all that it started.

    Args:
      arguments: the script and its arguments.
      environ: its whole environment.
      cwd: its working directory.
    """

    def __init__(self, arguments: Sequence[str], environ: Mapping[str, str], cwd: str):
        ends = {name: os.pipe() for name in ("stdout", "stderr", "record", "stacks")}
        record, stacks = ends["record"][1], ends["stacks"][1]
        self._progress = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as self
        passed = (record, stacks, self._progress.fileno())
        private = {environment.WORKER_PIPES: ",".join(map(str, (*passed, os.getpid())))}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(WORKER), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=ends["stdout"][1],
                stderr=ends["stderr"][1],
                env={**environ, **private},
                cwd=cwd,
                pass_fds=passed,
                start_new_session=True,
            )
        finally:
            for _, write_end in ends.values():
                os.close(write_end)
        self.pid = self._process.pid
        self.pipes = [Pipe(name, read_end) for name, (read_end, _) in ends.items()]

    def signal_group(self, number: int) -> None:
        """Send a signal to the worker and everything it started in its session."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def signal(self, number: int) -> None:
        """Send a signal to the worker alone."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def progress(self) -> str:
        """How far the script says it is; empty if it says nothing."""
        return decode(os.pread(self._progress.fileno(), RECORD_SIZE, 0))

    def ask_to_end(self) -> None:
        """SIGTERM, and SIGCONT so that a stopped worker can act on it."""
        self.signal_group(signal.SIGTERM)
        self.signal_group(signal.SIGCONT)

    def changes(self) -> list[StateChange]:
        """State changes since the last call; the last one may be ``exited`` or ``killed``."""
        found: list[StateChange] = []
        while self._process.returncode is None:
            pid, raw = os.waitpid(self.pid, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            if pid == 0:
                break
            if os.WIFSTOPPED(raw):
                found.append(StateChange("stopped", os.WSTOPSIG(raw)))
            elif os.WIFCONTINUED(raw):
                found.append(StateChange("continued", signal.SIGCONT))
            elif os.WIFSIGNALED(raw):
                found.append(StateChange("killed", os.WTERMSIG(raw)))
                self._process.returncode = -os.WTERMSIG(raw)
            else:
                found.append(StateChange("exited", os.WEXITSTATUS(raw)))
                self._process.returncode = os.WEXITSTATUS(raw)
        return found
