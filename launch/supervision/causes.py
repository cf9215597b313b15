"""Which of several failures brought the others about.

When a process ends, its peers see its connections close, often before its end itself is heard of.
Their errors are symptoms, which rank below every cause, in any order of arrival.
"""

import enum
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

# Signals by which a process dies of itself or of the kernel. SIGABRT is not one of them: a program
# aborts for reasons of its own, JAX's runtime for another process's.
_FAULTS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
_CRASHES = (signal.SIGKILL, *_FAULTS)
# Errors of the peers of a process that is gone, or late: gloo, NCCL, gRPC, JAX's coordination
# service, and Python's own sockets.
_SYMPTOMS = re.compile(
    r"\[?gloo|connection (?:closed|reset|refused)|broken ?pipe|socket closed"
    r"|timed? ?out|timeout|deadline_exceeded|unavailable:|heartbeat"
    r"|coordination ?service|distributed service|another task died|barrier"
    r"|nccl (?:operation|error)|remote (?:process|error)",
    re.IGNORECASE,
)
_PEERS_ERRORS = re.compile(
    r"(?:ConnectionResetError|ConnectionAbortedError|ConnectionRefusedError|BrokenPipeError"
    r"|TimeoutError)\b"
)
_RUNTIMES_ERRORS = re.compile(
    r"(?:jax\.errors\.JaxRuntimeError|(?:jaxlib\S*\.)?XlaRuntimeError"
    # JAX raises errors of gloo's that have no code as ValueError, with that word.
    r"|ValueError: (?:UNKNOWN|INTERNAL|UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED|CANCELLED):)"
)
_ABORTED_BY_JAX = re.compile(r"Terminating process because the JAX distributed service")


class Rank(enum.IntEnum):
    """How likely a failure is to be the cause of those beside it; the least is the likeliest."""

    CRASH = 0
    OWN = 1
    CUT_OFF = 2
    SYMPTOM = 3


@dataclass(frozen=True)
class Failure:
    """How one process failed.

    ``how`` is a phrase ("exit status 3"), ``status`` the job's exit status if this is the
    cause, ``signal`` the signal that killed it, ``moment`` when it failed (seconds on the
    supervisor's clock), ``rank`` whether it may be another's consequence, ``by_launcher`` that
    mpirun or srun may have ended it; their output then has the reason. ``traceback`` is empty
    where the script ended itself by ``sys.exit``, and None where it said nothing.
    """

    process_id: int
    how: str
    status: int
    moment: float
    signal: int | None = None
    traceback: str | None = None
    rank: Rank = Rank.OWN
    by_launcher: bool = False

    @property
    def is_runtimes_own(self) -> bool:
        """Whether it crashed, or JAX's runtime gave up: not the script, nor who sent a signal."""
        if self.traceback is not None:
            return bool(_RUNTIMES_ERRORS.match(_error(self.traceback)))
        return self.signal in (None, signal.SIGABRT, *_FAULTS)


def _error(traceback: str) -> str:
    """What is below the last frame of a traceback, from the line that names the error on.

    Not the last line alone: a message may have several, and JAX adds a note of its own to an error
    that is raised while it dispatches, but none to one that is raised where a result is asked for.
    """
    lines = traceback.splitlines()
    frames = [number for number, line in enumerate(lines) if line.startswith('  File "')]
    below = lines[frames[-1] + 1 :] if frames else lines[-1:]
    named = next((i for i, line in enumerate(below) if line and not line.startswith(" ")), 0)
    return "\n".join(below[named:])


def exited(process_id: int, status: int, moment: float, traceback: str | None = None) -> Failure:
    """A process that ended with a status of its own, by an exception if there is a traceback."""
    error = _error(traceback) if traceback else ""
    of_runtime = _RUNTIMES_ERRORS.match(error) and _SYMPTOMS.search(error)
    is_symptom = of_runtime or _PEERS_ERRORS.match(error)
    return Failure(
        process_id,
        f"exit status {status}",
        status,
        moment,
        traceback=traceback,
        rank=Rank.SYMPTOM if is_symptom else Rank.OWN,
    )


def killed(process_id: int, number: int, moment: float, stderr_tail: Sequence[str] = ()) -> Failure:
    """A process that a signal ended, with its last words."""
    how = f"killed by {signal_name(number)}"
    if number == signal.SIGKILL:
        how += " (out of memory, or killed by hand)"
    rank = Rank.CRASH if number in _CRASHES else Rank.OWN
    if number == signal.SIGABRT and _ABORTED_BY_JAX.search("\n".join(stderr_tail)):
        rank = Rank.SYMPTOM
    return Failure(process_id, how, 128 + number, moment, signal=number, rank=rank)


def ended_by_launcher(process_id: int, number: int, moment: float) -> Failure:
    """A process that mpirun or srun ended, with a signal that its agent got as well."""
    how = (
        f"ended by mpirun or srun with {signal_name(number)} (a time limit, scancel, or another "
        "step's end)"
    )
    return Failure(process_id, how, 128 + number, moment, signal=number, by_launcher=True)


def left_early(process_id: int, symptom: Failure) -> Failure:
    """A process that ended with status 0 while another needed it; the job's status is not 0."""
    how = f"ended with status 0, though process {symptom.process_id} still waited for it"
    return Failure(process_id, how, symptom.status or 1, symptom.moment)


def signal_name(number: int) -> str:
    """``SIGSTOP`` for 19."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def first_cause(failures: Sequence[Failure]) -> Failure:
    """The failure that brought the others about: the earliest of the likeliest rank."""
    return min(failures, key=lambda f: (f.rank, f.moment))
