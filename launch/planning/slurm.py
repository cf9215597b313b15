"""Slurm's allocation of this job: its hosts and their devices, from its variables."""

import re
from collections.abc import Mapping

from stretto.launch.errors import LaunchError

_PART = re.compile(r"((?:[^,\[]|\[[^\]]*\])+)")


def expand_nodelist(text: str) -> list[str]:
    """``["gpu03", "gpu04", "login"]`` for ``gpu[03-04],login``; leading zeros are kept."""
    return [host for part in _PART.findall(text) for host in _expand(part.strip())]


def _expand(part: str) -> list[str]:
    before, bracket, rest = part.partition("[")
    if not bracket:
        return [part] if part else []
    inside, _, after = rest.partition("]")
    found = []
    for piece in inside.split(","):
        first, dash, last = piece.partition("-")
        numbers = range(int(first), int(last if dash else first) + 1)
        for tail in _expand(after) or [""]:
            found += [f"{before}{number:0{len(first)}d}{tail}" for number in numbers]
    return found


def allocated_hosts(environ: Mapping[str, str]) -> list[str]:
    """Hosts of the allocation that this environment is in; empty outside of one."""
    text = environ.get("SLURM_JOB_NODELIST", "")
    try:
        return expand_nodelist(text)
    except ValueError:
        raise LaunchError(f"SLURM_JOB_NODELIST={text!r} is not a list of hosts") from None


def devices_per_host(environ: Mapping[str, str]) -> int | None:
    """GPUs that Slurm gives on each host, where it says so."""
    for name in ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"):
        count = environ.get(name, "").rpartition(":")[2]  # "h100:4" or "4"
        if count.isdigit():
            return int(count)
    return None
