"""GPUs or an error: no job that should be on GPUs trains on the CPU in silence."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import network_hosts
import pytest

from stretto.launch.planning import survey
from stretto.launch.planning.launchers import find_mpirun

LOCAL = ("--launcher", "local")
STRETTO_RUN = (sys.executable, "-m", "stretto.launch", "run")
FOUR = "".join(f"GPU {i}: NVIDIA H100 (UUID: GPU-{i}{i})\n" for i in range(4))
SHOW = "import os\nprint(os.environ['JAX_PLATFORMS'], os.environ.get('STRETTO_LOCAL_DEVICE_IDS'))"
JOIN = "import stretto.launch\nstretto.launch.initialize()\nprint('on', end=' ')\n"
HAS_GPU = shutil.which("nvidia-smi") is not None or any(Path("/dev").glob("nvidia[0-9]*"))
needs_no_gpu = pytest.mark.skipif(HAS_GPU, reason="is about a machine without GPUs")
MPIRUN, NO_HOSTS = find_mpirun(), network_hosts.why_not()


def smi(folder: Path, text: str = FOUR, status: int = 0, more: str = "") -> dict[str, str]:
    """An environment with an nvidia-smi that writes `text`; nothing else says a platform."""
    folder.mkdir(exist_ok=True)
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{more}\ncat <<'E'\n{text}E\nexit {status}\n")
    tool.chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}", "JAX_PLATFORMS": ""}


@needs_no_gpu
def test_default_is_said_in_one_line(run_job, tmp_path):
    result = run_job(SHOW, *LOCAL, "-n", "2", env={"JAX_PLATFORMS": ""})
    assert sorted(result.stdout.splitlines()) == ["[0] cpu None", "[1] cpu None"]
    (line,) = result.stderr.splitlines()
    assert "2 CPU devices in 2 processes: this machine has no NVIDIA GPU" in line
    result = run_job(SHOW, *LOCAL, "-n", "2", env=smi(tmp_path / "bin"))
    assert result.stdout == "[0] cuda,cpu 0,1\n"
    (line,) = result.stderr.splitlines()
    assert "2 GPUs in 1 process: this machine has 4 (NVIDIA H100)" in line


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_asked_for_is_not_said(run_job, tmp_path, platform):
    env = smi(tmp_path / "bin")
    result = run_job(SHOW, *LOCAL, "-n", "2", "--platform", platform, env=env)
    expected = {"cpu": ["[0] cpu None", "[1] cpu None"], "cuda": ["[0] cuda,cpu 0,1"]}
    assert sorted(result.stdout.splitlines()) == expected[platform]
    assert result.stderr == ""


@needs_no_gpu
@pytest.mark.parametrize("options", [("--processes-per", "2"), ()])
def test_job_planned_on_gpus_refuses_another_platform(run_job, tmp_path, options):
    """Even told "cuda,cpu", JAX takes the CPU where a process sees no device."""
    script = JOIN + "import jax\nprint(jax.devices())"
    result = run_job(script, *LOCAL, "-n", "4", *options, env=smi(tmp_path / "bin"))
    assert result.status == 1
    assert "on" not in result.stdout.replace("connected", "")
    assert "this job was planned on GPUs, and JAX came up on 'cpu'" in result.stderr


def test_driver_that_fails_ends_the_job_before_it_starts(run_job, tmp_path):
    env = smi(tmp_path / "bin", "Driver/library version mismatch\n", 18)
    result = run_job(SHOW, *LOCAL, "-n", "2", env=env)
    assert (result.status, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert "nvidia-smi on this machine failed with status 18" in line
    result = run_job(SHOW, *LOCAL, "-n", "1", "--platform", "cpu", env=env)
    assert result.status == 0


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    with network_hosts.make_hosts(2, tmp_path_factory.mktemp("hosts")) as made:
        yield made


@pytest.mark.skipif(MPIRUN is None or NO_HOSTS is not None, reason=str(NO_HOSTS))
class TestHosts:
    """Two hosts in network namespaces; the first has no GPU, as a login node."""

    pytestmark = pytest.mark.xdist_group("network_hosts")

    @pytest.fixture
    def start_on_login_node(self, start_job, hosts, tmp_path):
        def start(script, *options, smi_of_second="", env=None):
            """`smi_of_second`: a shell line, what nvidia-smi does on the second host."""
            tools = tmp_path / "tools"
            tools.mkdir()
            tool = tools / "nvidia-smi"
            tool.write_text(f"#!/bin/sh\n{smi_of_second}\n")
            tool.chmod(0o755)
            agent = tmp_path / "agent.sh"
            text = hosts.agent.read_text()
            if smi_of_second:
                text = text.replace("PATH=/usr", f"PATH={tools}:/usr")
            agent.write_text(text)
            agent.chmod(0o755)
            reach = {"PRTE_MCA_plm_ssh_agent": str(agent), "JAX_PLATFORMS": ""}
            if MPIRUN is not None and MPIRUN.flavour == "mpich":
                reach |= {"HYDRA_LAUNCHER": "ssh", "HYDRA_LAUNCHER_EXEC": str(agent)}
            command = hosts.command(hosts.names[0], *STRETTO_RUN)
            return start_job(script, *options, command=command, env={**reach, **(env or {})})

        return start

    def test_hosts_are_asked(self, start_on_login_node, hosts):
        listing = f"cat <<'E'\n{FOUR}E"
        job = start_on_login_node(SHOW, "--hosts", f"{hosts.names[1]}:4", smi_of_second=listing)
        result = job.result()
        assert result.stdout == "[0] cuda,cpu 0,1,2,3\n", result.stderr
        assert "4 GPUs in 1 process: the hosts have them" in result.stderr

    @needs_no_gpu
    def test_hosts_without_gpus(self, start_on_login_node, hosts):
        result = start_on_login_node(SHOW, "--hosts", f"{hosts.names[1]}:2").result()
        assert sorted(result.stdout.splitlines()) == ["[0] cpu None", "[1] cpu None"]
        assert f"no NVIDIA GPU on {hosts.names[1]}" in result.stderr

    @needs_no_gpu
    def test_gpus_that_were_planned_and_are_not_there(self, start_on_login_node, hosts):
        options = ("--platform", "cuda", "--hosts", f"{hosts.names[1]}:4")
        result = start_on_login_node(SHOW, *options).result()
        assert (result.status, result.stdout) == (2, "")
        assert f"host {hosts.names[1]} has 0 GPUs that a job can use" in result.stderr

    def test_driver_that_fails_on_a_host(self, start_on_login_node, hosts):
        fails = "echo mismatch; exit 18"
        job = start_on_login_node(SHOW, "--hosts", hosts.names[1], smi_of_second=fails)
        result = job.result()
        assert (result.status, result.stdout) == (2, "")
        (line,) = result.stderr.splitlines()
        assert f"nvidia-smi on host {hosts.names[1]} failed with status 18 (mismatch)" in line


@pytest.mark.parametrize(
    ("answer", "count"),
    [
        (FOUR + "stretto-status 0\n", 4),
        ("/dev/nvidia0\n/dev/nvidia3\nstretto-status none\n", 2),
        ("stretto-status none\n", 0),
        ("Welcome to node1!\n" + FOUR + "stretto-status 0\n", 4),
    ],
)
def test_answer_of_a_host(answer, count):
    assert len(survey.parse_answer(answer, "a", "").gpus) == count


def test_no_answer_of_a_host():
    with pytest.raises(survey.LaunchError, match="host a did not say which GPUs it has: no login"):
        survey.parse_answer("", "a", "no login")


def test_question_is_understood_by_sh(tmp_path):
    for environ, words in (
        (smi(tmp_path / "bin"), FOUR + "stretto-status 0\n"),
        (smi(tmp_path / "bad", "broken\n", 9), "broken\nstretto-status 9\n"),
    ):
        done = subprocess.run(
            ["sh", "-c", survey._QUESTION], env=environ, capture_output=True, text=True
        )
        assert done.stdout == words
    bare = {"PATH": "/nowhere"}
    shell = shutil.which("sh") or "sh"
    done = subprocess.run([shell, "-c", survey._QUESTION], env=bare, capture_output=True, text=True)
    assert done.stdout.endswith("stretto-status none\n")


def test_programs_that_reach_hosts():
    assert survey.reach_command({})[0] == "ssh"
    assert survey.reach_command({"OMPI_MCA_plm_rsh_agent": "ssh -p 22 : rsh"}) == (
        "ssh",
        "-p",
        "22",
    )
    assert survey.reach_command({"HYDRA_LAUNCHER_EXEC": "/a.sh"}) == ("/a.sh",)
