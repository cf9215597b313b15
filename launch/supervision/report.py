"""The last thing a failed job shows: which process, where, and its own words."""

import linecache
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stretto.launch.planning.layout import ProcessPlan

# Signals by which a process dies of itself or of the kernel. SIGABRT is not one of them: JAX
# aborts a process when another one of the job is gone.
_FIRST_CAUSE_SIGNALS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
_FRAME = re.compile(r'^\s+File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
_WORKER_FILE = str(Path(__file__).parents[1] / "worker.py")
TIMEOUT_STATUS = 124


@dataclass(frozen=True)
class Failure:
    """How one process failed.

    ``how`` is a phrase ("exit status 3"), ``status`` the job's exit status if this is the
    cause, ``signal`` the signal that killed it, ``moment`` when it failed (seconds on the
    supervisor's clock).
    """

    process_id: int
    how: str
    status: int
    moment: float
    signal: int | None = None
    traceback: str = ""

    @property
    def is_runtimes_own(self) -> bool:
        """Whether the process crashed, or JAX's runtime gave up, and not the script."""
        return not self.traceback or _error_line(self.traceback).startswith(
            "jax.errors.JaxRuntimeError"
        )


def _error_line(traceback: str) -> str:
    """The line that names the error: the first below the last frame, or the last without frames.

    Not the last line: a message may have several, and JAX adds a note of its own to an error that
    is raised while it dispatches, but none to one that is raised where a result is asked for.
    """
    lines = traceback.splitlines()
    frames = [number for number, line in enumerate(lines) if line.startswith('  File "')]
    below = lines[frames[-1] + 1 :] if frames else lines[-1:]
    return next((line for line in below if line and not line.startswith(" ")), "")


def exited(process_id: int, status: int, moment: float) -> Failure:
    """A process that ended with a status of its own."""
    return Failure(process_id, f"exit status {status}", status, moment)


def killed(process_id: int, number: int, moment: float) -> Failure:
    """A process that a signal ended."""
    how = f"killed by {signal_name(number)}"
    if number == signal.SIGKILL:
        how += " (out of memory, or killed by hand)"
    return Failure(process_id, how, 128 + number, moment, signal=number)


def signal_name(number: int) -> str:
    """``SIGSTOP`` for 19."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def first_cause(failures: Sequence[Failure]) -> Failure:
    """The failure that brought the others about: the earliest.

    A death by SIGKILL or a crash comes before exceptions of the same moment, which are usually
    its peers noticing a closed connection.
    """
    return min(failures, key=lambda f: (f.signal not in _FIRST_CAUSE_SIGNALS, f.moment))


def failure_text(
    failure: Failure,
    process: ProcessPlan,
    host: str,
    *,
    platform: str,
    num_processes: int,
    elapsed_s: float,
    progress: str,
    log_note: str,
    stderr_tail: Sequence[str],
) -> str:
    """A headline naming process, host, devices and log, then the traceback or last words."""
    devices = ",".join(map(str, process.device_ids))
    where = f" (GPU {devices})" if platform == "gpu" else ""
    headline = (
        f"stretto: process {failure.process_id} of {num_processes} on {host}{where} failed after "
        f"{elapsed_s:.1f} s{f' at {progress}' if progress else ''}: {failure.how}{log_note}"
    )
    if failure.traceback:
        return f"{headline}\n{failure.traceback.rstrip()}"
    if stderr_tail:
        words = "\n".join(f"  {line}" for line in stderr_tail)
        return f"{headline}\nIts last lines on stderr:\n{words}"
    return headline


@dataclass(frozen=True)
class Place:
    """Where a process's main thread is: file, line and function of the user's code."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        source = linecache.getline(self.file, self.line).strip()
        return f"{self.file}:{self.line}" + (f": {source}" if source else f" in {self.function}")


def place_in_script(stacks: Sequence[str], script: str) -> Place | None:
    """The innermost line of ``script`` that the main thread is at.

    Args:
      stacks: lines of faulthandler's dump of all threads, innermost frame first.
      script: the script as it was named to the worker.

    Returns:
      None if the main thread is not in the script, or gave no stack.
    """
    frames: list[Place] = []
    for line in [*stacks, "Thread end"]:
        if match := _FRAME.match(line):
            frames.append(Place(match["file"], int(match["line"]), match["function"]))
        else:
            if any(frame.file == _WORKER_FILE for frame in frames):
                return next((frame for frame in frames if frame.file == script), None)
            frames = []
    return None


@dataclass(frozen=True)
class Whereabouts:
    """Where a process is: its place in the script, else a word for its state, and its progress."""

    process_id: int
    place: Place | None
    state: str
    progress: str = ""

    def __str__(self) -> str:
        where = f"at {self.place}" if self.place else self.state
        return f"at {self.progress}, {where}" if self.progress else where


def whereabouts_text(processes: Sequence[Whereabouts]) -> str:
    """Processes grouped by where they are, the rarest place first: it is the likeliest cause."""
    groups: dict[str, list[int]] = {}
    for process in processes:
        process_id, text = process.process_id, str(process)
        groups.setdefault(text, []).append(process_id)
    lines = []
    for text, members in sorted(groups.items(), key=lambda item: len(item[1])):
        ids = ", ".join(map(str, members))
        verb = "process" if len(members) == 1 else "processes"
        lines.append(f"  {verb} {ids}: {text}")
    return "\n".join(lines)
