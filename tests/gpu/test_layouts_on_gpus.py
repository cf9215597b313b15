"""One process for all GPUs and one process per GPU: the same checks, the same bits (B26)."""

from __future__ import annotations

import os

import jobs
import pytest
import tally as tallies
from patience import shared

from stretto.launch.doctor.nccl import why_no_process_per_gpu

LIMIT_S = shared(200)


@pytest.mark.one_process
@pytest.mark.gpu(2)
@pytest.mark.timeout(2 * (LIMIT_S + 60), method="thread")
def test_both_layouts_give_the_same(mesh, rehearsing, tally, pytestconfig, record_property) -> None:
    nccl = pytestconfig.getoption("--nccl")
    environ = {**os.environ, **({"LD_PRELOAD": nccl} if nccl else {})}
    if not rehearsing and (reason := why_no_process_per_gpu(environ)):
        pytest.skip(f"{reason}; or pass --nccl FILE")
    found = {
        per: jobs.run(
            "layout_job.py",
            "xla" if rehearsing else "pallas",
            options=("-n", str(mesh.size), "--processes-per", per),
            limit_s=LIMIT_S,
            nccl=nccl,
        )
        for per in ("gpu", "node")
    }
    for per, count in (("gpu", mesh.size), ("node", 1)):
        assert found[per]["processes"] == count
        tally.checks(found[per]["checks"])
        for ratio in found[per]["ratios"]:
            record_property(tallies.RATIO, ratio)
        tally.none(f"a process per {per}: {flaw}" for flaw in found[per]["flaws"])
    assert found["gpu"]["bits"] == found["node"]["bits"]
