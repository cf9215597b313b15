"""The worker process as its agent sees it: started, read, signalled, reaped."""

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
from stretto.launch.supervision import descendants
from stretto.launch.supervision.stdin import Sink

_READ_SIZE = 1 << 14
# Asks a worker for its stacks. Not SIGUSR1, which is for scripts.
STACKS_SIGNAL = int(getattr(signal, "SIGRTMAX", signal.SIGUSR1 + 1)) - 1
WORKER = Path(__file__).parents[1] / "worker.py"


@dataclass(frozen=True)
class StateChange:
    """What ``waitpid`` said: ``exited`` (status), ``killed``, ``stopped`` (signal), ``continued``.

    ``number`` is the exit status or the signal.
    """

    state: str
    number: int


class Pipe:
    """One of the worker's output pipes."""

    def __init__(self, name: str, fd: int):
        self.name = name
        self.fd = fd
        self._rest = b""
        os.set_blocking(fd, False)

    def fileno(self) -> int:
        """The descriptor, so that a selector takes a pipe."""
        return self.fd

    def read(self) -> bytes | None:
        """What there is, up to 16 KiB; None if nothing is there now, nothing at the end."""
        try:
            return os.read(self.fd, _READ_SIZE)
        except BlockingIOError:
            return None

    def lines(self, data: bytes) -> list[str]:
        """The lines that ``data``, read last, completes; what is left comes at the end."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if self._rest and not data:
            lines.append(self._rest)
            self._rest = b""
        return [line.decode("utf-8", "surrogateescape") for line in lines]

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.fd)


class Child:
    """A worker in a session of its own, so that a signal reaches all that it started.

    Args:
      arguments: the script and its arguments.
      environ: its whole environment.
      cwd: its working directory.
      takes_stdin: whether it reads what is put into ``stdin``; else it finds that empty.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        environ: Mapping[str, str],
        cwd: str,
        *,
        takes_stdin: bool = False,
    ):
        ends = {name: os.pipe() for name in ("stdout", "stderr", "record", "stacks")}
        record, stacks = ends["record"][1], ends["stacks"][1]
        self._progress = _memory_file()
        passed = (record, stacks, self._progress)
        private = {environment.WORKER_PIPES: ",".join(map(str, (*passed, os.getpid())))}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(WORKER), *arguments],
                stdin=subprocess.PIPE if takes_stdin else subprocess.DEVNULL,
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
        self.stdin = Sink(os.dup(self._process.stdin.fileno())) if self._process.stdin else None
        if self._process.stdin:
            self._process.stdin.close()
        self.pipes = [Pipe(name, read_end) for name, (read_end, _) in ends.items()]

    def signal_group(self, number: int) -> None:
        """Send a signal to the worker and everything it started in its session."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def kill(self) -> None:
        """SIGKILL for the worker and all that it started, in sessions of their own, too."""
        self.signal_group(signal.SIGKILL)
        descendants.kill_all()

    def ask_for_stacks(self) -> None:
        """Have the worker write where its threads are."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, STACKS_SIGNAL)

    def progress(self) -> str:
        """How far the script says it is; empty if it says nothing."""
        return decode(os.pread(self._progress, RECORD_SIZE, 0))

    def ask_to_end(self, number: int = signal.SIGTERM) -> None:
        """The signal ``number``, and SIGCONT so that a stopped worker can act on it."""
        self.signal_group(number)
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

    def reap_orphans(self) -> None:
        """Let go of processes that the worker left behind and that have ended."""
        with contextlib.suppress(ChildProcessError):
            while found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                if found.si_pid == self.pid:
                    break
                os.waitpid(found.si_pid, os.WNOHANG)


def _memory_file() -> int:
    """A descriptor of a file that has no name, and on Linux no disk that could be full."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("stretto-progress")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
