"""A real Slurm on hosts that are network namespaces: munge, slurmctld and a slurmd a host.

The programs are those of this machine or, where it has none, Debian's packages, fetched by apt and
unpacked into a folder: nothing is installed. A prolog gives tasks their node's own
CUDA_VISIBLE_DEVICES, as Slurm does with GPUs; Debian 12's 22.05 does not read `Gres=` of its nodes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import network_hosts

PACKAGES = (
    *("slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins", "munge", "libmunge2"),
    *("libhwloc15", "liblua5.1-0"),
)
LIBRARIES = Path("usr/lib/x86_64-linux-gnu")
FETCH_LIMIT_S = 120
START_LIMIT_S = 40
CONFIGURATION = """ClusterName=test
SlurmctldHost={first}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
PluginDir={plugins}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SchedulerType=sched/builtin
SelectType=select/linear
TaskProlog={folder}/prolog
ReturnToService=2
KillWait=5
TreeWidth=1
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
"""


@dataclass(frozen=True)
class Slurm:
    """The running cluster; `run` is a command of Slurm's (or any other) on its first host."""

    hosts: network_hosts.Hosts
    folder: Path
    environ: Mapping[str, str]

    def command(self, *argv: str, host: int = 0) -> tuple[str, ...]:
        return self.hosts.command(self.hosts.names[host], *argv)

    def run(self, *argv: str, limit_s: float = 120, **more) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, **self.environ, **more.pop("env", {})}
        return subprocess.run(
            self.command(*argv), capture_output=True, text=True, timeout=limit_s, env=env, **more
        )

    def logs(self) -> str:
        """The last words of the daemons, for a test that fails."""
        files = sorted(self.folder.glob("*.log"))
        return "\n".join(f"{path.name}: {path.read_text()[-1500:]}" for path in files)


def fetch(folder: Path) -> Path | str:
    """The root under which Slurm's programs are, or why there is none."""
    if all(shutil.which(tool) for tool in ("slurmctld", "slurmd", "munged", "srun")):
        return Path("/")
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        return "needs Slurm and munge, or apt-get to fetch them"
    debs = folder / "debs"
    debs.mkdir()
    done = subprocess.run(
        ["apt-get", "download", *PACKAGES],
        cwd=debs,
        capture_output=True,
        text=True,
        timeout=FETCH_LIMIT_S,
    )
    if done.returncode != 0:
        return f"Slurm cannot be fetched: {done.stderr.strip()[-300:]}"
    for deb in debs.glob("*.deb"):
        subprocess.run(["dpkg", "-x", deb, folder / "root"], check=True, timeout=FETCH_LIMIT_S)
    return folder / "root"


@contextlib.contextmanager
def make_slurm(hosts: network_hosts.Hosts, root: Path, gpus: tuple[str, ...]) -> Iterator[Slurm]:
    """Slurm on these hosts, with such CUDA_VISIBLE_DEVICES; its daemons are killed at the end."""
    folder = hosts.agent.parent / "slurm"
    (folder / "state").mkdir(parents=True)
    libraries = f"{root / LIBRARIES}:{root / LIBRARIES / 'slurm-wlm'}"
    environ = {
        "SLURM_CONF": str(folder / "slurm.conf"),
        "LD_LIBRARY_PATH": libraries,
        "PATH": f"{root}/usr/bin:{root}/usr/sbin:{os.environ['PATH']}",
    }
    _configure(hosts, folder, root, gpus)
    slurm = Slurm(hosts, folder, environ)
    daemons = _start(slurm, root)
    try:
        _wait_until_idle(slurm, len(hosts.names))
        yield slurm
    finally:
        for daemon in reversed(daemons):
            daemon.kill()
            daemon.wait()


def _configure(hosts, folder: Path, root: Path, gpus: tuple[str, ...]) -> None:
    nodes = [f"NodeName={name} CPUs={os.cpu_count()} State=UNKNOWN" for name in hosts.names]
    plugins = root / LIBRARIES / "slurm-wlm"
    text = CONFIGURATION.format(
        first=hosts.names[0], folder=folder, plugins=plugins, nodes="\n".join(nodes)
    )
    (folder / "slurm.conf").write_text(text)
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    lines = ["#!/bin/sh", "case $SLURMD_NODENAME in"]
    for name, value in zip(hosts.names, gpus, strict=True):
        (folder / f"spool-{name}").mkdir()
        lines.append(f"{name}) echo export CUDA_VISIBLE_DEVICES={value} ;;")
    prolog = folder / "prolog"
    prolog.write_text("\n".join([*lines, "esac", ""]))
    prolog.chmod(0o755)
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)


def _start(slurm: Slurm, root: Path) -> list[subprocess.Popen]:
    folder, environ = slurm.folder, {**os.environ, **slurm.environ}
    programs = {
        name: next(p for p in (f"{name}-wlm", name) if shutil.which(p, path=environ["PATH"]))
        for name in ("slurmctld", "slurmd", "slurmstepd")
    }
    munge = ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket"]
    munge += [f"--key-file={folder}/munge.key", f"--pid-file={folder}/munge.pid"]
    munge += [f"--log-file={folder}/munge.log", f"--seed-file={folder}/munge.seed"]
    stepd = shutil.which(programs["slurmstepd"], path=environ["PATH"])
    commands = [munge, slurm.command(programs["slurmctld"], "-D")]
    for host in range(len(slurm.hosts.names)):
        commands.append(slurm.command(programs["slurmd"], "-D", "-d", str(stepd), host=host))
    started = []
    for argv in commands:
        with (folder / f"started-{len(started)}.log").open("wb") as log:
            started.append(
                subprocess.Popen(
                    list(argv),
                    env=environ,
                    cwd=folder,  # where a daemon that crashes leaves its core
                    stdout=log,
                    stderr=log,
                    stdin=subprocess.DEVNULL,
                )
            )
        if len(started) == 1:
            _wait_for(lambda: (folder / "munge.socket").exists())
    return started


def _wait_until_idle(slurm: Slurm, count: int) -> None:
    def idle() -> bool:
        said = slurm.run("sinfo", "--noheader", "--Node", "--format=%T").stdout.split()
        return said == ["idle"] * count

    try:
        _wait_for(idle)
    except TimeoutError:
        raise RuntimeError(slurm.logs()) from None


def _wait_for(seen) -> None:
    until = time.monotonic() + START_LIMIT_S
    while not seen():
        if time.monotonic() > until:
            raise TimeoutError
        time.sleep(0.1)
