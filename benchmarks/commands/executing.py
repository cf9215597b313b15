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
    status = _execute(run, tasks, helper, console, budget_s, name)
    run.save_what_is_due()
    return status


def _execute(
    run: Run,
    tasks: Sequence[Task],
    helper: Helper | None,
    console: Console,
    budget_s: float | None,
    name: str,
) -> int:
    with progress() as say:
        try:
            finished = run.execute(tasks, helper, console, budget_s, say)
        except DeviceLostError as error:
            print(f"{name}: {error}", file=sys.stderr)
            print("What was measured is kept; continue with --resume.", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print(f"{name}: interrupted; continue with --resume.", file=sys.stderr)
            return 130
    if not finished:
        print(f"{name}: the time limit has passed; continue with --resume.", file=sys.stderr)
    return 0
