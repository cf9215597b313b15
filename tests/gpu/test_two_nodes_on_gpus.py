"""Halves of one host as two nodes: kernels within each, NCCL between them, in one program."""

from __future__ import annotations

import os

import jobs
import pytest
import tally as tallies
from patience import shared

from stretto.launch.doctor.nccl import why_no_process_per_gpu

LIMIT_S = shared(400)


@pytest.mark.one_process
@pytest.mark.gpu(4)
@pytest.mark.timeout(LIMIT_S + 90)
@pytest.mark.parametrize("processes_per", ["2", "node", "gpu"])
def test_two_nodes(mesh, rehearsing, tally, pytestconfig, record_property, processes_per) -> None:
    """Of a process each, of one process together, and of a process for each GPU."""
    nccl = pytestconfig.getoption("--nccl")
    if processes_per == "gpu":
        if rehearsing:
            pytest.skip("the simulator needs the devices of a node in one process")
        environ = {**os.environ, **({"LD_PRELOAD": nccl} if nccl else {})}
        if reason := why_no_process_per_gpu(environ):
            pytest.skip(f"{reason}; or pass --nccl FILE")
    found = jobs.run(
        "two_node_job.py",
        "simulator" if rehearsing else "pallas",
        *(["all_gather_matmul", "all_reduce"] if rehearsing else []),
        options=("-n", str(mesh.size), "--processes-per", processes_per),
        limit_s=LIMIT_S,
        nccl=nccl if processes_per == "gpu" else None,
    )
    assert found["processes"] == {"2": 2, "node": 1, "gpu": mesh.size}[processes_per]
    record_property(tallies.CHECKS, found["checks"])
    record_property(tallies.LAUNCHES, found["launches"])
    for ratio in found["ratios"]:
        record_property(tallies.RATIO, ratio)
    tally.none(found["flaws"])
