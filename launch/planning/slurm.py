"""Slurm's allocation of this job: its hosts, their GPUs and tasks.

Its variables describe the node they are read on; what other nodes have, ``scontrol`` knows.
"""

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence

from stretto.launch.errors import LaunchError
from stretto.launch.planning.network import same_host

_PART = re.compile(r"((?:[^,\[]|\[[^\]]*\])+)")
_NODE_DETAIL = re.compile(r"^\s*Nodes=(\S+) CPU_IDs=\S* Mem=\S*(?: GRES=(\S*))?", re.MULTILINE)
_GPU_COUNT = re.compile(r"(?:^|,)gpu(?::[^:,(]+)?:(\d+)")
_REPEATED = re.compile(r"^(\d+)(?:\(x(\d+)\))?$")
_SCONTROL_LIMIT_S = 10


def expand_nodelist(text: str) -> list[str]:
    """``["gpu03", "gpu04", "login"]`` for ``gpu[03-04],login``; leading zeros are kept.

    In Slurm's order, which counts the last bracket fastest.
    """
    if text.count("[") != text.count("]"):
        raise ValueError(f"{text!r} has a bracket that is not closed")
    return [host for part in _PART.findall(text) for host in _expand(part.strip())]


def _expand(part: str) -> list[str]:
    before, bracket, rest = part.partition("[")
    if not bracket:
        return [part] if part else []
    inside, _, after = rest.partition("]")
    tails = _expand(after) or [""]
    found = []
    for piece in inside.split(","):
        first, dash, last = piece.partition("-")
        for number in range(int(first), int(last if dash else first) + 1):
            found += [f"{before}{number:0{len(first)}d}{tail}" for tail in tails]
    return found


def allocated_hosts(environ: Mapping[str, str]) -> list[str]:
    """Hosts of the allocation that this environment is in, in Slurm's order; empty outside of one.

    Asks ``scontrol`` where it is there, which knows names that no rule here would expand.

    Raises:
      LaunchError: the list cannot be read.
    """
    text = environ.get("SLURM_JOB_NODELIST", "")
    if not text:
        return []
    if "[" in text and (answer := _scontrol("show", "hostnames", text)):
        return answer.split()
    try:
        return expand_nodelist(text)
    except ValueError:
        raise LaunchError(f"SLURM_JOB_NODELIST={text!r} is not a list of hosts") from None


def gpus_of_hosts(environ: Mapping[str, str], hosts: Sequence[str]) -> dict[str, int] | None:
    """GPUs that Slurm gives this job on each of its hosts; None where unknown.

    By ``scontrol``, since nodes may have different numbers of them; else by the variables of
    this node, taken to hold for all.
    """
    job = environ.get("SLURM_JOB_ID", "")
    if job and (answer := _scontrol("show", "job", "-d", job)):
        found = parse_job_details(answer)
        if any(found.values()) and all(host in found for host in hosts):
            return {host: found[host] for host in hosts}
    count = gpus_per_host(environ)
    return None if count is None else dict.fromkeys(hosts, count)


def parse_job_details(text: str) -> dict[str, int]:
    """GPUs by host from ``scontrol show job -d``."""
    found: dict[str, int] = {}
    for match in _NODE_DETAIL.finditer(text):
        count = sum(map(int, _GPU_COUNT.findall(re.sub(r"\([^)]*\)", "", match[2] or ""))))
        for host in expand_nodelist(match[1]):
            found[host] = found.get(host, 0) + count
    return found


def gpus_per_host(environ: Mapping[str, str]) -> int | None:
    """GPUs on this host by Slurm's variables, counted over all types; None if they do not say."""
    for name in ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"):
        text = re.sub(r"\([^)]*\)", "", environ.get(name, ""))  # "h100:4(S:0-1)"
        counts = [part.rpartition(":")[2] for part in text.split(",")]  # "h100:4" or "4"
        if text and all(count.isdecimal() for count in counts):
            return sum(map(int, counts))
    return None


def tasks_of_hosts(environ: Mapping[str, str], num_hosts: int) -> list[int]:
    """Tasks on each host if the allocation asked for a number of them, else one on each.

    From ``SLURM_TASKS_PER_NODE``, such as ``4(x2),3``.
    """
    asked = any(environ.get(name) for name in ("SLURM_NTASKS_PER_NODE", "SLURM_NTASKS"))
    counts: list[int] = []
    for part in environ.get("SLURM_TASKS_PER_NODE", "").split(","):
        if match := _REPEATED.match(part):
            counts += [int(match[1])] * int(match[2] or 1)
    return counts if asked and len(counts) == num_hosts else [1] * num_hosts


def node_names(hosts: Sequence[str], allocated: Sequence[str]) -> list[str]:
    """Slurm's own names for the hosts of a job, which may be named in full or in short.

    Raises:
      LaunchError: a host is not of the allocation.
    """
    names = []
    for host in hosts:
        found = next((name for name in allocated if same_host(name, host)), None)
        if found is None:
            raise LaunchError(
                f"host {host} is not of this Slurm allocation, which has {', '.join(allocated)}; "
                "name those only, or choose --launcher mpirun"
            )
        names.append(found)
    return names


def _scontrol(*arguments: str) -> str | None:
    """What ``scontrol`` writes, or None if it is not there or fails."""
    tool = shutil.which("scontrol")
    if tool is None:
        return None
    try:
        answer = subprocess.run(
            [tool, *arguments], capture_output=True, text=True, timeout=_SCONTROL_LIMIT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout if answer.returncode == 0 else None
