"""What `stretto` refuses: one line with the way out, status 2, no traceback, nothing running."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path

import pytest

from stretto.launch import cli
from stretto.launch.planning import gpus, launchers

FAKE_SMI = """#!/bin/sh
echo 'GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-aaaa)'
echo 'GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-bbbb)'
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("script.py").write_text("print('should not run')")
    return "script.py"


@pytest.fixture
def two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(FAKE_SMI)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def refused(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that a refused command line writes."""
    assert cli.main(["run", *arguments]) == 2
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    (line,) = captured.err.splitlines()
    return line


def test_missing_script(capfd):
    line = refused(capfd, "-n", "2", "no/such.py")
    assert "no/such.py does not exist" in line


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--platform gpu", "--platform gpu must be cuda or cpu"),
        ("--launcher=ssh", "--launcher ssh must be auto, mpirun, srun or local"),
        ("--bind core", "--bind core must be auto, numa or none"),
        ("--stdin all", "--stdin all must be first or none"),
        ("--processes-per host", "--processes-per host must be node, gpu or a whole number"),
        ("--processes-per 1.5", "--processes-per 1.5 must be node, gpu or a whole number"),
        ("-n 2 --min-devices 5", "--min-devices 5 must be from 1 to the 2 devices of the job"),
    ],
)
def test_options_of_some_words(capfd, script, words, said):
    assert refused(capfd, *words.split(), script) == f"stretto run: {said}"


def test_a_folder_is_no_script(capfd, tmp_path):
    assert "is no file; give the path" in refused(capfd, "-n", "2", str(tmp_path))


def test_an_interface_that_this_machine_lacks(capfd, script):
    line = refused(capfd, "-n", "2", "--platform", "cpu", "--interface", "ib7", script)
    assert "--interface ib7: this machine has no such network interface; it has lo" in line


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("-n", "0"), "-n 0 must be at least 1"),
        (("-n", "x"), "-n x must be a whole number"),
        (("--num-devices=x",), "--num-devices x must be a whole number"),
        (("--timeout", "soon"), "--timeout soon must be a number of seconds"),
        (("-n", "-3"), "-n -3 must be at least 1"),
        (("--timeout", "0"), "--timeout 0 must be more than 0"),
        (("--restarts", "-1"), "--restarts -1 must be at least 0"),
        (("--grace", "-0.5"), "--grace -0.5 must be at least 0"),
        (("--grace", "nan"), "--grace nan must be at least 0"),
        (("--port", "70000"), "--port 70000 must be from 1 to 65535"),
        (("--env", "=x"), "--env '=x' has no name"),
        (("--env", "NOT_SET_ANYWHERE"), "--env NOT_SET_ANYWHERE is not set here"),
        (("--env", "STRETTO_RENDEZVOUS=1"), "the launcher's own variable"),
        (("--env", "STRETTO_PLATFORM=cuda"), "the launcher's own variable"),
        (("--env", "STRETTO_PROCESS_ID=7"), "the launcher's own variable"),
        (("--hostfile", "none"), "--hostfile none: No such file"),
        (("--hostfile", "a", "--hosts", "b"), "--hostfile and --hosts both name hosts"),
        (("--hosts", "a:0"), "'a:0' needs a number of at least 1"),
        (("--hosts", "a:2,b:2", "-n", "5"), "4 in all (a:2, b:2); pass -n 4, or give a host"),
        (("--hosts", "localhost", "-n", "2"), "more: NAME:COUNT in --hosts, slots=COUNT in a"),
        (("--launcher", "srun"), "needs a Slurm allocation"),
        (("--hosts", "a:1", "--launcher", "local"), "on this machine only"),
        (("--hosts", "a:²"), "'a:²' needs a number of at least 1"),
        (
            ("--bind", "numa", "--platform", "cpu"),
            "--bind numa is for the cores beside a process's",
        ),
        (("-n", "2", "--processes-per", "0"), "--processes-per 0 cannot share"),
        (("--timeout", "nan"), "--timeout nan must be more than 0"),
        (("--start-timeout", "nan"), "--start-timeout nan must be more than 0"),
        (("--grace", "inf"), "--grace inf must be at most 1000000"),
        (("--network-timeout", "1e9"), "--network-timeout 1e+09 must be at most 86400"),
    ],
)
def test_option_that_cannot_be(capfd, script, monkeypatch, options, words):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert words in refused(capfd, *options, script)


def test_hostfile_that_is_no_text(capfd, script):
    Path("hosts").write_bytes(b"node1 slots=2\n\x95\xff\n")
    assert "--hostfile hosts is no text" in refused(capfd, "--hostfile", "hosts", script)


def test_working_directory_that_is_gone(capfd, tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert "cd to one that does" in refused(capfd, "-n", "2", "../script.py")


def test_no_room_for_the_hostfile(capfd, script, monkeypatch):
    """A job on this machine needs none, so that a killed one leaves no folder behind."""

    def no_room(**_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "TemporaryDirectory", no_room)
    there = launchers.MpiRun("mpirun", "openmpi", (5, 0))
    monkeypatch.setattr(launchers, "find_mpirun", lambda _: there)
    options = ("--platform", "cpu", "--dry-run")
    line = refused(capfd, *options, "--hosts", "a:1,b:1", "--launcher", "mpirun", script)
    assert "cannot be written (No space left on device); set TMPDIR" in line
    assert cli.main(["run", *options, "-n", "2", script]) == 0


def test_more_devices_than_gpus(capfd, script, two_gpus):
    line = refused(capfd, "-n", "3", script)
    assert "-n 3 is more than the 2 GPUs of this machine" in line
    assert "JAX_PLATFORMS=cpu" in line


def test_more_devices_than_visible_gpus(capfd, script, two_gpus, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    line = refused(capfd, "-n", "2", script)
    assert "the 1 GPU of this machine under CUDA_VISIBLE_DEVICES=1" in line


def test_taken_port(capfd, script):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = refused(capfd, "--launcher", "local", "-n", "2", "--port", str(port), script)
    assert f"--port {port} is taken" in line


def test_inside_another_launcher(capfd, script, monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    line = refused(capfd, script)
    assert "process 1 of 4 started by openmpi" in line


def test_mpirun_that_cannot_start(capfd, script, tmp_path, monkeypatch):
    """Its own words come along, below the line."""
    broken = tmp_path / "mpirun"
    broken.write_text(
        "#!/bin/sh\n[ $1 = --version ] && echo 'mpirun (Open MPI) 4.1.9' && exit\n"
        "echo 'no such plugin' >&2; exit 77\n"
    )
    broken.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    monkeypatch.setattr(gpus, "list_gpus", lambda: ())
    assert cli.main(["run", "-n", "2", script]) == 2
    lines = capfd.readouterr().err.splitlines()
    assert lines == ["stretto run: only 0 of 2 processes could be started", "  no such plugin"]


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare"
)
def test_host_name_that_does_not_resolve(tmp_path):
    (tmp_path / "script.py").write_text("print('should not run')")
    command = "hostname nowhere.invalid && exec python -m stretto.launch run --launcher local"
    result = subprocess.run(
        ["unshare", "--uts", "sh", "-c", f"{command} -n 2 script.py"],
        cwd=tmp_path,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert "the host name nowhere.invalid does not resolve" in line
    assert "/etc/hosts" in line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["rnu"], "did you mean run?"), (["fly"], "there are run, doctor, bench")],
)
def test_unknown_command(capfd, arguments, words):
    assert cli.main(arguments) == 2
    assert words in capfd.readouterr().err


def test_unknown_option(capfd, script):
    line = refused(capfd, "--tiemout", "3", script)
    assert line == "stretto run: there is no option --tiemout; did you mean --timeout?"


def test_no_script(capfd):
    assert "no SCRIPT was given" in refused(capfd, "-n", "3")


def test_help_needs_no_jax():
    code = "import sys; from stretto.launch.cli import main; main(['--help'])\n"
    code += "try: main(['run', '--help'])\nexcept SystemExit: pass\n"
    code += "import stretto.launch.supervision.agent, stretto.launch.commands.run\n"
    code += "sys.exit('jax' in sys.modules)"
    result = subprocess.run(
        [shutil.which("python") or "python", "-c", code], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    for word in ("run", "doctor", "bench", "tune", "simulate", "--processes-per", "SCRIPT"):
        assert word in result.stdout
