"""One process for all GPUs, one per GPU, and several on each: the same checks (B26)."""

from __future__ import annotations

import os

import jobs
import pytest
import tally as tallies
from patience import shared

from stretto.launch.doctor.nccl import why_no_process_per_gpu, why_no_shared_gpu

LIMIT_S = shared(200)
SHARING_LIMIT_S = shared(300)  # Eight devices on one H200 took 187 s.


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


@pytest.mark.one_process
@pytest.mark.real
@pytest.mark.parametrize("devices", [2, 4, 8])
@pytest.mark.timeout(SHARING_LIMIT_S + 60, method="thread")
def test_devices_that_share_a_gpu(devices, tally, pytestconfig, record_property) -> None:
    """More devices than the machine may have, in processes that take turns on its GPUs."""
    nccl = pytestconfig.getoption("--nccl")
    environ = {**os.environ, **({"LD_PRELOAD": nccl} if nccl else {})}
    if reason := why_no_shared_gpu(environ):
        pytest.skip(f"{reason}; or pass --nccl FILE")
    found = jobs.run(
        "layout_job.py",
        "pallas",
        "briefly",
        options=("-n", str(devices), "--devices-per-gpu", str(devices)),
        limit_s=SHARING_LIMIT_S,
        nccl=nccl,
    )
    assert found["processes"] == devices
    tally.checks(found["checks"])
    for ratio in found["ratios"]:
        record_property(tallies.RATIO, ratio)
    tally.none(found["flaws"])
