"""Runs a sweep for a command: lost devices, interruptions, time limits."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console

from stretto.benchmarks.commands.start import progress
from stretto.benchmarks.errors import DeviceLostError
from stretto.benchmarks.sweeps.expand import Task
from stretto.benchmarks.sweeps.run import Run
from stretto.benchmarks.timing.measure import Helper


def execute(
    run: Run,
    tasks: Sequence[Task],
    helper: Helper | None,
    console: Console,
    budget_s: float | None,
    name: str,
) -> int:
    """Times the remaining cases; prints on stderr why it ended early, with the command's name.

    Returns the exit status: 0, also where the time limit passed; 1 if the devices were lost; 130
    if it was interrupted.

    Raises:
      BenchmarkError: the results cannot be written.
    """
    status, ended_by = 0, ""
    with progress() as say:
        try:
            if not run.execute(tasks, helper, console, budget_s, say):
                ended_by = "the time limit has passed"
        except DeviceLostError as error:
            status, ended_by = 1, f"{error}\nWhat was measured is kept"
        except KeyboardInterrupt:
            status, ended_by = 130, "interrupted"
    if ended_by:
        print(f"{name}: {ended_by}; continue with --resume.", file=sys.stderr)
    run.save_what_is_due()
    return status
