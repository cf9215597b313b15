"""What can go wrong in a benchmark, each kind with what the sweep does about it."""

from __future__ import annotations

from stretto.distributed.errors import BackendUnavailableError


class BenchmarkError(Exception):
    """A caller's mistake, in one line; the command ends with status 2."""


class UnavailableError(Exception):
    """A peer or a shape cannot be timed here; the reason is recorded and the sweep continues."""


class DeviceLostError(Exception):
    """The devices stopped responding (a kernel trapped); the sweep ends, its results are kept."""


def first_line(error: Exception) -> str:
    """The first line of an error's message, at most 300 characters; with its type, unless it says
    why something is not there.
    """
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else ""
    if not isinstance(error, UnavailableError | BackendUnavailableError):
        text = f"{type(error).__name__}: {text}"
    return text[:300]
