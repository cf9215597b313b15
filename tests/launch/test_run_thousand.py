"""A thousand processes on 32 hosts, which are network namespaces of this machine.

The only test of the launcher with limits of time. They are for two cores; a machine that does much
else at the same time may not keep them.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import network_hosts as helper
import pytest

from stretto.launch.planning.launchers import find_mpirun

MPIRUN = find_mpirun()
REASON = "needs an mpirun that works" if MPIRUN is None else helper.why_not()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
    pytest.mark.xdist_group("network_hosts"),
]

NUM_PROCESSES = 1000
NUM_HOSTS = 32
NUM_LINES = 20
START_LIMIT_S = 120
MEMORY_LIMIT_KB = 500_000
IDLE_LIMIT = 0.05  # of a core
IDLE_S = 8.0
TOLD_LIMIT_S = 5.0
VICTIM = 567

STUB = f"""
import os, time
os.write(1, f"begun {{os.getpid()}}\\n".encode())
for i in range({NUM_LINES}):
    os.write(1, f"line {{i}}\\n".encode())
os.write(1, b"last\\n")
time.sleep(600)
"""


@pytest.fixture(scope="module")
def many_hosts(tmp_path_factory) -> Iterator[helper.Hosts]:
    with helper.make_hosts(NUM_HOSTS, tmp_path_factory.mktemp("hosts")) as hosts:
        yield hosts


def hosts_option(hosts: helper.Hosts) -> str:
    more = NUM_PROCESSES % NUM_HOSTS
    counts = [NUM_PROCESSES // NUM_HOSTS + (i < more) for i in range(NUM_HOSTS)]
    return ",".join(f"{name}:{n}" for name, n in zip(hosts.names, counts, strict=True))


def begun(out: Path) -> dict[int, int]:
    """By process, its pid, of those that have begun."""
    found = re.findall(r"^\[ *(\d+)\] begun (\d+)$", out.read_text(), re.MULTILINE)
    return {int(process_id): int(pid) for process_id, pid in found}


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def most_memory_kb(pid: int) -> int:
    found = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) if found else 0


def processes_on(hosts: helper.Hosts) -> list[str]:
    listed = [("ip", "netns", "pids", name) for name in hosts.names]
    return [
        pid
        for command in listed
        for pid in subprocess.run(command, capture_output=True, text=True).stdout.split()
    ]


def wait_until(seen, limit_s: float, job: subprocess.Popen) -> None:
    until = time.monotonic() + limit_s
    while not seen() and time.monotonic() < until and job.poll() is None:
        time.sleep(0.1)


def test_thousand_processes(many_hosts, tmp_path):
    out, err, folders = tmp_path / "out", tmp_path / "err", tmp_path / "tmp"
    folders.mkdir()
    (tmp_path / "script.py").write_text(STUB)
    run = (sys.executable, "-m", "stretto.launch", "run", "--log-dir", "logs")
    options = ("--hosts", hosts_option(many_hosts), "--start-timeout", "300", "script.py")
    reach = {"JAX_PLATFORMS": "cpu", "TMPDIR": str(folders), **many_hosts.reach(MPIRUN)}
    with out.open("wb") as stdout, err.open("wb") as stderr:
        job = subprocess.Popen(
            many_hosts.command(many_hosts.names[0], *run, *options),
            env={**os.environ, **reach},
            cwd=tmp_path,
            stdout=stdout,
            stderr=stderr,
        )
    try:
        began = time.monotonic()
        wait_until(lambda: len(begun(out)) == NUM_PROCESSES, 2 * START_LIMIT_S, job)
        started_s = time.monotonic() - began
        pids = begun(out)
        assert len(pids) == NUM_PROCESSES, err.read_text()
        time.sleep(IDLE_S / 2)
        before = cpu_s(job.pid)
        time.sleep(IDLE_S)
        idle = (cpu_s(job.pid) - before) / IDLE_S
        memory_kb = most_memory_kb(job.pid)
        logs = [(tmp_path / "logs/latest" / f"process-{i}.log") for i in range(NUM_PROCESSES)]
        lines = [f"line {i}" for i in range(NUM_LINES)]
        wanted = [[f"begun {pids[i]}", *lines, "last"] for i in range(NUM_PROCESSES)]
        assert [log.read_text().splitlines() for log in logs] == wanted

        os.kill(pids[VICTIM], signal.SIGKILL)
        killed = time.monotonic()
        words = f"process {VICTIM} of {NUM_PROCESSES} on {many_hosts.names[18]}"
        wait_until(lambda: words in err.read_text(), 10 * TOLD_LIMIT_S, job)
        told_s = time.monotonic() - killed
        assert job.wait(60) == 128 + signal.SIGKILL
        assert words in err.read_text().splitlines()[-1]
    finally:
        job.terminate()
        job.wait(60)
    wait_until(lambda: not processes_on(many_hosts), 10, job)
    assert not processes_on(many_hosts)
    assert not list(folders.iterdir())
    figures = f"{started_s:.0f} s, {memory_kb} kB, {100 * idle:.1f}%, {told_s:.1f} s"
    assert started_s < START_LIMIT_S, figures
    assert memory_kb < MEMORY_LIMIT_KB, figures
    assert idle < IDLE_LIMIT, figures
    assert told_s < TOLD_LIMIT_S, figures
