"""The last thing a failed job shows: which process, where, and its own words."""

import itertools
import linecache
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stretto.launch.planning.layout import ProcessPlan
from stretto.launch.supervision.causes import Failure

_FRAME = re.compile(r'^\s+File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
_WORKER_FILE = str(Path(__file__).parents[1] / "worker.py")
_PACKAGES = re.compile(r"/(?:site|dist)-packages/")
_JAX = re.compile(r"-packages/(?:jax|jaxlib|stretto/distributed)/")
# Where processes join one another, and where those that have joined learn of all devices.
_JOINING = re.compile(r"-packages/(?:jax/_src/(?:distributed|xla_bridge)|jaxlib/xla_client)\.py$")
_STANDARD_LIBRARY = re.compile(r"/lib/python3[^/]*/")
TIMEOUT_STATUS = 124
_LONGEST_LIST = 8  # of processes that are named one by one


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
    return next((frame for frame in _main_thread(stacks) if frame.file == script), None)


def innermost_frame(stacks: Sequence[str]) -> Place | None:
    """Where the main thread is, in whosever code; None if it gave no stack."""
    return next(iter(_main_thread(stacks)), None)


def may_wait_for_others(frame: Place) -> bool:
    """Whether a main thread that stands still there may wait for other processes in JAX.

    JAX is called from its own Python code, from Stretto's that waits for others (`first_runs`) or,
    past its first call of a function, from that of the user. Code of Python and of other packages
    waits for threads and other things of its own.
    """
    if _PACKAGES.search(frame.file):
        return _JAX.search(frame.file) is not None
    return not frame.file.startswith("<") and not _STANDARD_LIBRARY.search(frame.file)


def may_be_joining(frame: Place) -> bool:
    """Whether a main thread that stands still there may wait for all processes of the job.

    Of a process that joins the others: one that is alone finds its devices there, too.
    """
    return _JOINING.search(frame.file) is not None


def _main_thread(stacks: Sequence[str]) -> list[Place]:
    """Its frames, the innermost first: the thread that goes through the worker's file."""
    frames: list[Place] = []
    for line in [*stacks, "Thread end"]:
        if match := _FRAME.match(line):
            frames.append(Place(match["file"], int(match["line"]), match["function"]))
        else:
            if any(frame.file == _WORKER_FILE for frame in frames):
                return frames
            frames = []
    return []


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
        ids = ", ".join(_ranges(members))
        verb = "process" if len(members) == 1 else "processes"
        lines.append(f"  {verb} {ids}: {text}")
    return "\n".join(lines)


def _ranges(numbers: Sequence[int]) -> list[str]:
    """Ascending numbers as words, where more than ``_LONGEST_LIST`` follow one another: ``3-9``."""
    words: list[str] = []
    runs = itertools.groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    for _, pairs in runs:
        run = [number for _, number in pairs]
        if len(run) > _LONGEST_LIST:
            words.append(f"{run[0]}-{run[-1]}")
        else:
            words += map(str, run)
    return words
