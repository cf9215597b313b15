"""Running jobs in tests: every job is watched, so that one that leaves a process behind fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

MARK = "STRETTO_TEST_MARK"  # forwarded, being STRETTO_*; so all of a job's processes carry it
STRETTO = (sys.executable, "-m", "stretto.launch")


@dataclass(frozen=True)
class Result:
    """How a job ended: its status, what it wrote and what it left running."""

    status: int
    stdout: str
    stderr: str
    left: list[str]

    def last_line(self) -> str:
        return self.stderr.rstrip().splitlines()[-1]


def carriers(mark: str) -> list[str]:
    """Command lines of processes whose environment has the mark."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes():
                found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue  # gone, or not ours to read
    return [line for line in found if line]


class Job:
    """A `stretto run` that a test looks at while it runs."""

    def __init__(self, arguments: list[str], env: dict[str, str], cwd: Path):
        self.mark = uuid.uuid4().hex
        self.process = subprocess.Popen(
            arguments,
            env={**os.environ, **env, MARK: self.mark},
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="surrogateescape",
        )

    def wait_for(self, seen: Callable[[], object], limit_s: float = 60) -> None:
        until = time.monotonic() + limit_s
        while not seen():
            if time.monotonic() > until or self.process.poll() is not None:
                pytest.fail(f"the job did not get that far: {self.process.communicate(timeout=9)}")
            time.sleep(0.02)

    def child_named(self, *names: str) -> int:
        """The process of this job that runs a program of one of these names."""
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                marked = f"{MARK}={self.mark}".encode() in (folder / "environ").read_bytes()
                if marked and (folder / "comm").read_text().strip() in names:
                    return int(folder.name)
            except OSError:
                continue
        pytest.fail(f"no process of the job runs {' or '.join(names)}")

    def result(self, limit_s: float = 90) -> Result:
        """How it ended, which must be within the limit: scripts that wait do so for longer."""
        try:
            stdout, stderr = self.process.communicate(timeout=limit_s)
        finally:
            self.process.kill()
        until = time.monotonic() + 15
        while (left := carriers(self.mark)) and time.monotonic() < until:
            time.sleep(0.05)
        return Result(self.process.returncode, stdout, stderr, left)


@pytest.fixture(autouse=True, scope="session")
def signals_are_not_ignored() -> Iterator[None]:
    """A job inherits the signals that are ignored, as for tests in the background of a script."""
    defaults = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    ignored = [number for number in defaults if signal.getsignal(number) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, defaults[number])
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


@pytest.fixture
def start_job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """`start_job(script, *options, args=(), env={})`; the script's text becomes a file."""
    jobs: list[Job] = []

    def start(
        script: str,
        *options: str,
        args: tuple[str, ...] = (),
        env: dict[str, str] | None = None,
        command: tuple[str, ...] = (*STRETTO, "run"),
    ) -> Job:
        path = tmp_path / "script.py"
        path.write_text(script)
        jobs.append(Job([*command, *options, str(path), *args], env or {}, tmp_path))
        return jobs[-1]

    yield start
    for job in jobs:
        if job.process.poll() is None:
            job.process.send_signal(signal.SIGTERM)
            job.process.wait(20)


@pytest.fixture
def run_job(start_job: Callable[..., Job]) -> Callable[..., Result]:
    """Like `start_job`, to the end; nothing may be left running."""

    def run(script: str, *options: str, **more: object) -> Result:
        result = start_job(script, *options, **more).result()
        assert result.left == []
        return result

    return run
