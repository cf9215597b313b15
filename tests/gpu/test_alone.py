"""Programs in processes of their own: they may end with the GPU in disorder, or not end at all."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("alone.py")
LIMIT_S = 2
REPORT = (
    r"kernel {name} gave up after 2 s: process 0, device \d+, block \(\d+, \d+, \d+\) waits for"
    r" semaphore {semaphore}\S* >= \d+, which is \d+"
)


@dataclass(frozen=True)
class Ended:
    """How a program ended; `seconds` since it said that it was launched."""

    status: int
    stdout: str
    stderr: str
    seconds: float


def run(*arguments: str, patience_s: float) -> Ended:
    """Runs `alone.py`, and kills it `patience_s` after it said that it was launched."""
    # These tests' own process holds most of the GPUs' memory.
    settings = {"STRETTO_WAIT_LIMIT_S": str(LIMIT_S), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), *arguments],
        env=os.environ | settings,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        first = process.stdout.readline()
        start = time.monotonic()
        out, err = process.communicate(timeout=patience_s)
        assert first == "launched\n", err[-3000:]
        return Ended(process.returncode, out, err, time.monotonic() - start)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.mark.gpu(2)
@pytest.mark.parametrize(
    ("name", "semaphore"),
    [
        ("all_gather_matmul", "released"),
        ("all_gather_matmul", "received"),
        ("matmul_reduce_scatter", "produced"),
        ("matmul_all_reduce", "finished"),
    ],
)
def test_a_signal_that_never_comes(name: str, semaphore: str) -> None:
    """The program ends in time, with a report of who waits for what."""
    ended = run("dropped", name, semaphore, patience_s=LIMIT_S + 20)
    assert ended.status != 0 and "right" not in ended.stdout
    assert ended.seconds <= LIMIT_S + 10, f"{ended.seconds:.1f} s"
    report = REPORT.format(name=name, semaphore=semaphore)
    assert re.search(rf"KernelTimeoutError: .*{report}", ended.stderr), ended.stderr[-3000:]


@pytest.mark.gpu(2)
def test_more_than_2_to_the_31_elements() -> None:
    ended = run("huge", patience_s=60)
    assert ended.status == 0 and ended.stdout == "right\n", ended.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.gpu(2)
def test_two_threads_on_one_mesh() -> None:
    ended = run("threads", patience_s=60)
    assert ended.status == 0 and ended.stdout == "right\n", ended.stderr[-3000:]
