"""The commands that start agents, for the MPI libraries there are."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from stretto.launch.errors import LaunchError
from stretto.launch.planning import launchers
from stretto.launch.planning.launchers import MpiRun
from stretto.launch.planning.layout import HostDevices, plan

TWO_HOSTS = plan([HostDevices("a", 2), HostDevices("b", 1)], "gpu", "gpu")
AGENT = launchers.agent_program()
ONE_HOST = plan([HostDevices("localhost", 4)], "cpu", None)


def fake(tmp_path: Path, name: str, text: str) -> Path:
    tool = tmp_path / name
    tool.write_text(f"#!/bin/sh\ncat <<'E'\n{text}\nE\n")
    tool.chmod(0o755)
    return tool


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mpirun (Open MPI) 4.1.4\n\nReport bugs to", ("openmpi", (4, 1, 4))),
        ("mpirun.real (OpenRTE) 4.0.3", ("openmpi", (4, 0, 3))),
        ("mpirun (Open MPI) 5.0.11", ("openmpi", (5, 0, 11))),
        ("HYDRA build details:\n    Version:       4.2.1\n", ("mpich", (4, 2, 1))),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.9", None),
        ("", None),
    ],
)
def test_version(text, expected):
    assert launchers.parse_mpirun_version(text) == expected


def test_openmpi_5_as_root():
    mpirun = MpiRun("/x/mpirun", "openmpi", (5, 0, 11))
    argv = launchers.mpirun_command(ONE_HOST, AGENT, mpirun, None, is_root=True).argv
    text = " ".join(argv)
    assert argv[0] == "/x/mpirun"
    assert "--bind-to none" in text
    assert "--allow-run-as-root" in argv
    assert "OVERSUBSCRIBE" in text
    assert "-n 4" in text
    assert argv[-4:] == (sys.executable, "-P", "-m", "stretto.launch.supervision.agent")
    assert "STRETTO_RENDEZVOUS" in argv  # by name: its value is no one's business in `ps`


def test_openmpi_4_with_hosts():
    mpirun = MpiRun("/x/mpirun", "openmpi", (4, 1, 4))
    argv = launchers.mpirun_command(TWO_HOSTS, AGENT, mpirun, Path("/t/hosts"), is_root=False).argv
    text = " ".join(argv)
    assert "--oversubscribe" in argv
    assert "--hostfile /t/hosts" in text
    assert "--allow-run-as-root" not in argv
    assert launchers.hostfile_text(TWO_HOSTS, "openmpi") == "a slots=2\nb slots=1\n"


def test_mpich():
    mpirun = MpiRun("/x/mpirun", "mpich", (4, 2))
    argv = launchers.mpirun_command(TWO_HOSTS, AGENT, mpirun, Path("/t/hosts"), is_root=True).argv
    text = " ".join(argv)
    assert "-f /t/hosts" in text
    assert "-genvlist STRETTO_RENDEZVOUS" in text
    assert "--" not in text.split(sys.executable)[0]  # no option of Open MPI's
    assert launchers.hostfile_text(TWO_HOSTS, "mpich") == "a:2\nb:1\n"


def test_local_agents_are_numbered():
    commands = launchers.local_commands(ONE_HOST, AGENT)
    assert [c.environ["STRETTO_AGENT_INDEX"] for c in commands] == ["0", "1", "2", "3"]


def test_choice(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    nothing = {"PATH": str(tmp_path)}
    assert launchers.choose("auto", nothing, one_machine=True) == "local"
    with pytest.raises(LaunchError, match="no mpirun was found"):
        launchers.choose("auto", nothing, one_machine=False)
    with pytest.raises(LaunchError, match="no mpirun was found"):
        launchers.choose("mpirun", nothing, one_machine=True)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    path = fake(tmp_path, "mpirun", "mpirun (Open MPI) 4.1.4")
    chosen = launchers.choose("auto", nothing, one_machine=True)
    assert chosen == MpiRun(str(path), "openmpi", (4, 1, 4))
    fake(tmp_path, "srun", "")
    allocated = {"SLURM_JOB_ID": "1", **nothing}
    assert launchers.choose("auto", allocated, one_machine=False) == "srun"
    assert launchers.choose("mpirun", allocated, one_machine=False) == chosen


def test_allocation_without_any_launcher(tmp_path, monkeypatch):
    """As in a container: the way out is this node alone."""
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match=r"neither srun nor mpirun.*--launcher local"):
        launchers.choose("auto", {"SLURM_JOB_ID": "1", "PATH": str(tmp_path)}, one_machine=False)


def test_arguments_of_the_users_own_come_last():
    for mpirun in (MpiRun("m", "openmpi", (5, 0)), MpiRun("m", "mpich", (4, 2))):
        command = launchers.mpirun_command(
            ONE_HOST, AGENT, mpirun, None, is_root=False, extra=["--mca", "btl", "^openib"]
        )
        text = " ".join(command.argv)
        assert "STRETTO_RENDEZVOUS --mca btl ^openib -n 4 " in text
