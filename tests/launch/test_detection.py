"""Environments of real launchers, and what a process makes of them."""

from __future__ import annotations

import re

import pytest

from stretto.launch.errors import LaunchError
from stretto.launch.process.detection import Launched, detect, fingerprint, inside_launcher
from stretto.launch.process.startup import devices_of_local_process

OPEN_MPI_4 = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_MCA_orte_hnp_uri": "1;tcp://10.0.0.1:4",
    "PMIX_RANK": "3",
}
OPEN_MPI_5 = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PRTE_LAUNCHED": "1",
    "PMIX_NAMESPACE": "prterun-vm-1@1",
}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}
SLURM_BATCH = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "x",
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
}
IN_SLURM_STEP = {**SLURM, "SLURM_PROCID": "0"}


@pytest.mark.parametrize(
    ("environ", "launcher"),
    [
        (OPEN_MPI_4, "openmpi"),
        (OPEN_MPI_5, "openmpi"),
        (MPICH, "mpich"),
        (SLURM, "slurm"),
        ({**IN_SLURM_STEP, **TORCHRUN}, "torchrun"),
        ({**IN_SLURM_STEP, **OPEN_MPI_5}, "openmpi"),
    ],
)
def test_launchers(environ, launcher):
    assert detect(environ) == Launched(launcher, 3, 4, 1, 2)
    assert inside_launcher(environ) == detect(environ)


@pytest.mark.parametrize(
    "environ", [{}, {"RANK": "1", "WORLD_SIZE": "2"}, {"PMIX_RANK": "1"}, SLURM_BATCH]
)
def test_no_launcher(environ):
    assert detect(environ) is None


OURS = {
    "STRETTO_PROCESS_ID": "0",
    "STRETTO_NUM_PROCESSES": "1",
    "STRETTO_LOCAL_PROCESS_ID": "0",
    "STRETTO_NUM_LOCAL_PROCESSES": "1",
}


@pytest.mark.parametrize("around", [{}, OPEN_MPI_5, MPICH, SLURM], ids=["alone", "m", "h", "s"])
@pytest.mark.parametrize(
    ("inner", "launcher"),
    [
        ({}, "stretto"),
        ({**OPEN_MPI_5, "PMIX_NAMESPACE": "prterun-vm-2@1"}, "openmpi"),
        ({**MPICH, "PMI_PORT": "vm:1"}, "mpich"),
        ({**SLURM, "SLURM_STEP_ID": "5"}, "slurm"),
        (TORCHRUN, "torchrun"),
    ],
)
def test_launcher_inside_a_job_of_ours(around, inner, launcher):
    """Ours is around it; what was around ours does not count."""
    told = {**OURS, "STRETTO_OUTER": fingerprint({**OURS, **around})}
    place = detect({**around, **told, **inner})
    assert place is not None
    assert (place.launcher, place.num_processes) == (launcher, 1 if launcher == "stretto" else 4)


def test_a_launcher_of_one_process_may_hold_a_job():
    alone = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    assert detect(alone) is not None
    assert inside_launcher(alone) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"PMI_RANK": "4"}, "PMI_RANK=4 must be less than PMI_SIZE=4"),
        ({"PMI_RANK": "-1"}, "PMI_RANK=-1 must be less than PMI_SIZE=4"),
        ({"PMI_SIZE": "four"}, "PMI_SIZE='four' must be an integer"),
    ],
)
def test_contradictions(change, words):
    with pytest.raises(LaunchError, match=re.escape(words)):
        detect({**MPICH, **change})


@pytest.mark.parametrize(("text", "count"), [("3,1", 1), ("2(x3),1", 2), ("5", 1), ("", 1)])
def test_slurm_tasks_per_node(text, count):
    launched = detect({**SLURM, "SLURM_STEP_TASKS_PER_NODE": text})
    assert launched is not None
    assert launched.num_local_processes == count


@pytest.mark.parametrize(
    ("local_id", "processes", "num_gpus", "devices"),
    [
        (0, 1, 4, None),  # alone: all
        (1, 4, 4, (1,)),
        (1, 2, 4, (2, 3)),
        (2, 4, 1, None),  # each sees its own
        (2, 4, 0, None),
    ],
)
def test_devices_of_local_process(local_id, processes, num_gpus, devices):
    launched = Launched("openmpi", local_id, processes, local_id, processes)
    assert devices_of_local_process(launched, num_gpus) == devices


def test_devices_that_cannot_be_shared():
    launched = Launched("openmpi", 0, 3, 0, 3)
    with pytest.raises(LaunchError, match="3 processes on this host cannot share its 4 GPUs"):
        devices_of_local_process(launched, 4)
