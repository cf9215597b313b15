"""What can go wrong in a benchmark, each kind with what the sweep does about it."""

from __future__ import annotations


class BenchmarkError(Exception):
    """A caller's mistake, in one line; the command ends with status 2."""


class UnavailableError(Exception):
    """A peer or a shape cannot be timed here; the reason is recorded and the sweep continues."""


class DeviceLostError(Exception):
    """The devices stopped responding (a kernel trapped); the sweep ends, its results are kept."""
