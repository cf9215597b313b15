"""Runs sweeps: completed cases, the time limit, saving, progress."""

from __future__ import annotations

import datetime
import math
import pathlib
import sys
import time
from collections.abc import Callable, Sequence

import jax
from rich.console import Console

from stretto.benchmarks.errors import BenchmarkError, DeviceLostError
from stretto.benchmarks.measurements import figures, results
from stretto.benchmarks.measurements.machine import describe
from stretto.benchmarks.measurements.results import Draw, Machine, Measurement, Results
from stretto.benchmarks.pages import terminal
from stretto.benchmarks.sweeps import plan
from stretto.benchmarks.sweeps.expand import Task
from stretto.benchmarks.timing.ahead import Ahead
from stretto.benchmarks.timing.compiling import Compiler
from stretto.benchmarks.timing.measure import Helper, Prepared, Settings, prepare, take
from stretto.benchmarks.timing.timers import agreed, first_process_says

BATCH = 24
"""Cases whose programs are compiled together; their results come after that."""


class Run:
    """A sweep in progress: its results so far and where they are saved.

    Args:
      path: the results file, None to keep nothing.
      resume: continue with the results in `path`, if they are of this machine.
      overwrite: drop the results in `path`.
      command: the command line, for the record.
      settings: how to time.
      rehearsal: the results will be no measurement of speed, whatever the devices.
      draw: how the cases were drawn, if they were; results of another draw are not continued.
      batch: cases whose programs are compiled together.
      ahead: processes that compile the kernels among these; None to compile all here.
    """

    def __init__(
        self,
        path: pathlib.Path | None,
        *,
        resume: bool,
        overwrite: bool,
        command: Sequence[str],
        settings: Settings,
        rehearsal: bool = False,
        draw: Draw | None = None,
        batch: int = BATCH,
        ahead: Ahead | None = None,
    ):
        self._path = path
        self._settings = settings
        self._most = batch
        self._ahead = ahead
        machine = describe()
        self._is_due = False  # whether the file lacks something
        self.results = Results(
            schema=results.SCHEMA,
            start_time=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            command=list(command),
            machine=machine,
            measurement_of_speed=machine.platform == "gpu" and not rehearsal,
            link_gb_per_s=settings.link_gb_per_s,
            draw=draw,
        )
        # Only the first process may see the file; it sends the others the list of done cases.
        first = jax.process_index() == 0
        if path is not None and first and path.exists() and not overwrite:
            self.results.measurements = _earlier(path, resume, machine, draw)

    @property
    def done(self) -> set[tuple]:
        """The keys of the cases that need no timing any more."""
        return {measurement.key for measurement in self.results.measurements}

    def execute(
        self,
        tasks: Sequence[Task],
        helper: Helper | None,
        console: Console,
        budget_s: float | None,
        say: Callable[[str], None],
    ) -> bool:
        """Times the remaining cases and saves each of them.

        Returns whether everything was timed: False once `budget_s` seconds have passed.

        Raises:
          DeviceLostError: the devices stopped responding; what was measured is saved.
        """
        began = time.monotonic()

        def left_s() -> float:
            return math.inf if budget_s is None else budget_s - (time.monotonic() - began)

        def out_of_time() -> bool:
            return agreed(left_s() < 0) if budget_s is not None else False

        done = first_process_says([item.case.key in self.done for item in tasks])
        todo = [item for item, is_done in zip(tasks, done, strict=True) if not is_done]
        total = len(todo)
        while todo:
            if out_of_time():
                return False
            batch, todo = todo[: (size := self._batch(todo, left_s()))], todo[size:]
            with Compiler() as compiler:
                prepared = self._prepare(batch, compiler, out_of_time, say)
                if self._ahead is not None and not todo:
                    self._ahead.close()
                while prepared:
                    if out_of_time():
                        return False
                    say(f"{len(todo) + len(prepared)} of {total} to go: {prepared[0].case}")
                    # Taken out of the list, so that its operands are freed when it is done.
                    self._take(prepared.pop(0), helper, console, say)
        return True

    def _batch(self, todo: Sequence[Task], left_s: float) -> int:
        """How many of `todo` to compile together: no more than there is time left to time."""
        if jax.process_count() > 1:
            return 1
        size = 0
        while size < min(self._most, len(todo)) and left_s > 0:
            left_s -= plan.seconds(todo[size].case, todo[size].peers, self._settings)
            size += 1
        return max(1, size)

    def _prepare(
        self,
        batch: Sequence[Task],
        compiler: Compiler,
        out_of_time: Callable[[], bool],
        say: Callable[[str], None],
    ) -> list[Prepared]:
        """Traces all of `batch`, one after another, and waits until all is compiled."""
        began = time.monotonic()
        found = []
        if self._ahead is not None:
            self._ahead.begin([item.case for item in batch])
        for position, item in enumerate(batch):
            say(f"tracing {position + 1} of {len(batch)}: {item.case}")
            ahead = None if self._ahead is None else self._ahead.wait(item.case)
            found.append(
                prepare(item.case, item.peers, self._settings, compiler, out_of_time, ahead=ahead)
            )
        traced = time.monotonic()
        say(f"compiling {len(batch)} cases")
        compiler.wait()
        if jax.process_index() == 0:
            seconds = f"traced in {traced - began:.0f} s, {time.monotonic() - traced:.0f} s later"
            others = f"; {self._ahead.said()}" if self._ahead is not None else ""
            print(f"{len(batch)} cases {seconds} compiled{others}", file=sys.stderr, flush=True)
        return found

    def _take(
        self,
        prepared: Prepared,
        helper: Helper | None,
        console: Console,
        say: Callable[[str], None],
    ) -> None:
        case = prepared.case

        def tell(text: str) -> None:
            say(f"{case}: {text}")

        try:
            self._add(take(prepared, self._settings, helper, tell), console)
        except DeviceLostError as error:
            # Recorded, so that a run that continues does not lose them to the same case again.
            lost = figures.begin(case, 0)
            lost.skipped = f"it lost the devices: {error}"
            self._add(lost, console)
            raise DeviceLostError(f"{case}: {error}") from error

    def _add(self, measurement: Measurement, console: Console) -> None:
        self.results.measurements.append(measurement)
        if jax.process_index() != 0:
            return
        terminal.print_measurement(console, measurement, self.results.machine.platform)
        try:
            self.save()
        except BenchmarkError as error:  # as where a disk is full for a while
            self._is_due = True
            print(f"stretto bench: {error} Tried again after the next case.", file=sys.stderr)

    def save_what_is_due(self) -> None:
        """Writes the results if that failed before; BenchmarkError if it fails again."""
        if self._is_due:
            self.save()

    def save(self) -> None:
        """Writes the results so far, where there is a file for them."""
        if self._path is not None and jax.process_index() == 0:
            results.write(self.results, self._path)
            self._is_due = False


def _earlier(
    path: pathlib.Path, resume: bool, machine: Machine, draw: Draw | None
) -> list[Measurement]:
    """The measurements in `path`, to continue with."""
    if not resume:
        raise BenchmarkError(
            f"{path} exists; continue it with --resume, or drop it with --overwrite."
        )
    found = results.read(path)
    for what in ("card", "num_devices", "layout"):
        there, here = getattr(found.machine, what), getattr(machine, what)
        if there != here:
            raise BenchmarkError(
                f"{path}: its {what} is {there!r}, here it is {here!r}; write to another file."
            )
    if found.draw != draw:
        raise BenchmarkError(f"{path}: it holds {found.draw}, not {draw}; write to another file.")
    return found.measurements
