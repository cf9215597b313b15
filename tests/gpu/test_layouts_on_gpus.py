"""One process for all GPUs and one process per GPU: the same checks, the same bits (B26)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tally as tallies

from stretto.launch.doctor.nccl import why_no_process_per_gpu

JOB = Path(__file__).with_name("layout_job.py")
LIMIT_S = 200


def run_job(processes_per: str, devices: int, rehearsing: bool, nccl: str | None) -> dict:
    """Runs the job by `stretto run`; what its process 0 found."""
    preload = ["--env", f"LD_PRELOAD={nccl}"] if nccl else []
    command = [
        *(sys.executable, "-m", "stretto.launch", "run", "-n", str(devices)),
        *("--processes-per", processes_per, "--timeout", str(LIMIT_S), *preload),
        *(str(JOB), "xla" if rehearsing else "pallas"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S + 60)
    said = [line.partition("] ")[2] for line in done.stdout.splitlines() if '"processes": ' in line]
    assert said, f"status {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    return json.loads(said[-1])


@pytest.mark.gpu(2)
@pytest.mark.timeout(2 * (LIMIT_S + 60), method="thread")
def test_both_layouts_give_the_same(mesh, rehearsing, tally, pytestconfig, record_property) -> None:
    nccl = pytestconfig.getoption("--nccl")
    environ = {**os.environ, **({"LD_PRELOAD": nccl} if nccl else {})}
    if not rehearsing and (reason := why_no_process_per_gpu(environ)):
        pytest.skip(f"{reason}; or pass --nccl FILE")
    found = {per: run_job(per, mesh.size, rehearsing, nccl) for per in ("gpu", "node")}
    for per, count in (("gpu", mesh.size), ("node", 1)):
        assert found[per]["processes"] == count
        tally.checks(found[per]["checks"])
        for ratio in found[per]["ratios"]:
            record_property(tallies.RATIO, ratio)
        tally.none(f"a process per {per}: {flaw}" for flaw in found[per]["flaws"])
    assert found["gpu"]["bits"] == found["node"]["bits"]
