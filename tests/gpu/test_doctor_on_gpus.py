"""`stretto doctor` on a machine with GPUs: it sees them all, and that each reaches every other."""

from __future__ import annotations

import json
import subprocess
import sys

import jax
import pytest
from patience import shared

pytestmark = [pytest.mark.gpu(2), pytest.mark.real, pytest.mark.one_process]


def test_findings(tally) -> None:
    command = [sys.executable, "-m", "stretto.launch", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=shared(180))
    report = json.loads(done.stdout)
    findings = {finding["topic"]: finding for finding in report["findings"]}
    count = len(jax.devices())
    seen = json.dumps(report, indent=1)
    # Other topics are the machine's own affair: its name, its MPI, its NCCL.
    for topic in ("python", "jax", "driver", "jax devices", "peers"):
        assert findings[topic]["level"] == "ok", seen
    assert findings["jax devices"]["text"].startswith(f"{count} gpu devices"), seen
    assert findings["peers"]["text"].startswith(f"{count} GPUs; a store from each arrived"), seen
    for index in range(count):
        assert "compute capability" in findings[f"gpu {index}"]["text"], seen
    assert findings["nvlink"]["level"] in ("ok", "warning"), seen
    tally.checks(len(findings))
