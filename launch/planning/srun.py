"""The ``srun`` that starts a job's agents inside a Slurm allocation."""

import re
import subprocess
from collections.abc import Mapping, Sequence

from stretto.launch import environment
from stretto.launch.planning import network, slurm
from stretto.launch.planning.launchers import AgentCommand
from stretto.launch.planning.layout import Layout

_VERSION_LIMIT_S = 10
_FIRST_WITH_OVERLAP = (20, 11)


def srun_commands(
    layout: Layout,
    agent: tuple[str, ...],
    environ: Mapping[str, str],
    extra: Sequence[str] = (),
) -> tuple[AgentCommand, ...]:
    """One ``srun`` step for all agents, or one a host where they are shared out in another way.

    That is where hosts have different numbers of processes, or not Slurm's order. (Slurm's own way
    to say so, ``--distribution=arbitrary``, has made its controller crash: 22.05.8.)

    Args:
      environ: with Slurm's variables of the allocation.
      extra: arguments of the user's own, which come last.

    Raises:
      LaunchError: a host is not of the allocation.
    """
    allocated = slurm.allocated_hosts(environ)
    names = _slurm_names(list(layout.hosts), allocated, environ)
    counts = list(layout.hosts.values())
    options = ["--distribution=block", "--kill-on-bad-exit=1", "--export=ALL", "--cpu-bind=none"]
    if "SLURM_STEP_ID" in environ and _has_overlap(environ):
        # Inside a step, as of `srun --pty bash`: it has what the new step would wait for.
        options.append("--overlap")
    tail = (*options, *extra, *agent)
    if len(set(counts)) == 1 and names == sorted(names, key=allocated.index):
        return (AgentCommand((*_step(names, len(counts), counts[0]), *tail), starts_others=True),)
    firsts = [sum(counts[:i]) for i in range(len(counts))]
    return tuple(
        AgentCommand(
            (*_step([name], 1, count), *tail),
            {environment.AGENT_FIRST: str(first)},
            starts_others=True,
        )
        for name, count, first in zip(names, counts, firsts, strict=True)
    )


def _step(names: Sequence[str], num_hosts: int, per_host: int) -> list[str]:
    """``srun`` on these hosts, with so many processes on each."""
    argv = ["srun", f"--nodes={num_hosts}", f"--ntasks={num_hosts * per_host}"]
    argv.append(f"--ntasks-per-node={per_host}")
    return [*argv, f"--nodelist={','.join(names)}"] if names else argv


def _slurm_names(
    hosts: Sequence[str], allocated: Sequence[str], environ: Mapping[str, str]
) -> list[str]:
    """Slurm's names of the hosts; none where it gave no list and there is no choice."""
    if not allocated:
        return []
    if list(hosts) == ["localhost"]:
        own = environ.get("SLURMD_NODENAME", network.host_name())
        return slurm.node_names([own if len(allocated) > 1 else allocated[0]], allocated)
    return slurm.node_names(hosts, allocated)


def _has_overlap(environ: Mapping[str, str]) -> bool:
    """Whether this ``srun`` knows ``--overlap``; one before 20.11 shares without being told."""
    try:
        answer = subprocess.run(
            ["srun", "--version"],
            capture_output=True,
            text=True,
            timeout=_VERSION_LIMIT_S,
            env=dict(environ),
        )
    except (OSError, subprocess.TimeoutExpired):
        return True
    match = re.search(r"(\d+)\.(\d+)", answer.stdout)
    return match is None or (int(match[1]), int(match[2])) >= _FIRST_WITH_OVERLAP
