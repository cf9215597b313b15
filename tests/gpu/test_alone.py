"""Programs in processes of their own: they may end with the GPU in disorder, or not end at all.

All are started at once, since most of their time is the start; then they go on one by one.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator

import pytest
from folders import HELPERS
from patience import shared

pytestmark = [pytest.mark.gpu(2), pytest.mark.real, pytest.mark.one_process]

SCRIPT = HELPERS / "alone.py"
LIMIT_S = shared(2)
START_S = shared(120)
DROPPED = [
    ("all_gather_matmul", "released"),
    ("all_gather_matmul", "received"),
    ("matmul_reduce_scatter", "produced"),
    ("matmul_all_reduce", "finished"),
    ("matmul_reduce_scatter", "opening"),
    ("all_reduce", "opening"),
    ("all_reduce", "closing"),
]
REPORT = (
    r"KernelTimeoutError: .*kernel {name} gave up after [\d.]+ s: process 0, device \d+,"
    r" block \(\d+, \d+, \d+\) waits for semaphore {semaphore}\S* >= \d+, which is \d+"
)


class Program:
    """`alone.py` with arguments, in a process group of its own, with a limit to each step."""

    def __init__(self, *arguments: str):
        self.name = " ".join(arguments)
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as this
        # These tests' own process holds a part of the GPUs' memory.
        settings = {
            "STRETTO_WAIT_LIMIT_S": str(LIMIT_S),
            "STRETTO_START_LIMIT_S": str(LIMIT_S),
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        }
        self._process = subprocess.Popen(
            [sys.executable, str(SCRIPT), *arguments],
            env=os.environ | settings,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,
        )
        self._overdue = threading.Timer(START_S, self.kill)
        self._overdue.start()

    def run(self, patience_s: float) -> tuple[int, str, float]:
        """Lets it go on once it is ready: its status, its output, and the seconds it took."""
        assert self._process.stdout is not None
        first = self._process.stdout.readline()
        self._overdue.cancel()
        if first != "ready\n":
            return self._process.wait(), first, 0.0
        start = time.monotonic()
        try:
            output, _ = self._process.communicate("go\n", timeout=patience_s)
        except subprocess.TimeoutExpired:
            self.kill()
            output, _ = self._process.communicate()
        return self._process.returncode, output, time.monotonic() - start

    def errors(self) -> str:
        """What it wrote to stderr."""
        self._errors.seek(0)
        return self._errors.read()

    def kill(self) -> None:
        """Ends it, if it has not ended, and whatever it started."""
        self._overdue.cancel()
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


@contextlib.contextmanager
def started(*all_arguments: tuple[str, ...]) -> Iterator[list[Program]]:
    """Programs that have been started; none is left at the end."""
    programs = [Program(*arguments) for arguments in all_arguments]
    try:
        yield programs
    finally:
        for program in programs:
            program.kill()


def test_signals_that_never_come(tally) -> None:
    """The program ends in time, with a report of who waits for what."""
    flaws = []
    with started(*(("dropped", *case) for case in DROPPED)) as programs:
        for program, (name, semaphore) in zip(programs, DROPPED, strict=True):
            status, output, seconds = program.run(patience_s=LIMIT_S + shared(20))
            if status == 0 or "right" in output:
                flaws.append(f"{program.name} ended well: {output}")
            if seconds > LIMIT_S + shared(10):
                flaws.append(f"{program.name} ended after {seconds:.1f} s")
            report = REPORT.format(name=name, semaphore=semaphore)
            if not re.search(report, program.errors()):
                reports = re.findall(r"^.*gave up.*$", program.errors(), re.MULTILINE)
                found = "\n".join(reports) or program.errors()[-3000:]
                flaws.append(f"{program.name} left no such report after {seconds:.1f} s:\n{found}")
    tally.checks(len(DROPPED))
    tally.none(flaws)


def test_programs_that_end_well(tally) -> None:
    """A result of more than 2^31 elements; two threads on one mesh; work that nobody waits for."""
    flaws = []
    with started(("huge",), ("threads",), ("unfinished",)) as programs:
        for program in programs:
            status, output, seconds = program.run(patience_s=shared(60))
            if status or output != "right\n":
                flaws.append(
                    f"{program.name} ended with {status} after {seconds:.1f} s:\n"
                    f"{output}{program.errors()[-3000:]}"
                )
    tally.checks(3)
    tally.none(flaws)
