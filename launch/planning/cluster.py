"""Cluster files: what a job needs to know of its hosts, written once in TOML.

A file in ``configs/cluster`` shows all of it. Options of the command line come before the file.
"""

import re
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

import msgspec

from stretto.launch.environment import SET_BY_LAUNCHER
from stretto.launch.errors import LaunchError


class Cluster(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Hosts and how to use them.

    ``devices_per_host`` is the number of GPUs (or CPU devices) of a host that names none itself
    (``"node3:4"``); ``platform`` is what those devices are; ``image`` is an Apptainer image in
    which every process runs.
    """

    hosts: tuple[str, ...]
    devices_per_host: int
    platform: Literal["gpu", "cpu"] = "gpu"
    processes_per: Literal["node", "gpu"] | int | None = None
    interface: str | None = None
    image: str | None = None
    environment: Mapping[str, str] = {}


def load_cluster(path: Path) -> Cluster:
    """Read a cluster file.

    Raises:
      LaunchError: it cannot be read, is not TOML, or a field is missing, unknown or of the wrong
        type, or a variable cannot be set; names file and field.
    """
    try:
        cluster = msgspec.toml.decode(path.read_bytes(), type=Cluster)
    except OSError as error:
        raise LaunchError(f"--cluster {path}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise LaunchError(f"--cluster {path}: {error}{_remedy(str(error))}") from None
    if not cluster.hosts:
        raise LaunchError(f'--cluster {path}: hosts is empty; write hosts = ["node1", "node2"]')
    if cluster.devices_per_host < 1:
        raise LaunchError(
            f"--cluster {path}: devices_per_host = {cluster.devices_per_host} must be at least 1"
        )
    for name, value in cluster.environment.items():
        if fault := _fault(name, value):
            raise LaunchError(f"--cluster {path}: [environment] {name!r} {fault}")
    return cluster


def _fault(name: str, value: str) -> str:
    """Why a variable cannot be set for a job's processes; empty if it can."""
    if name in SET_BY_LAUNCHER:
        return "is the launcher's own variable; choose another name"
    if not name or "=" in name or "\0" in name:
        return 'is no name of a variable; write NAME = "value"'
    return "has a zero byte in its value; leave that out" if "\0" in value else ""


_WORDS = {"platform": '"gpu" or "cpu"', "processes_per": '"node", "gpu" or a number'}
_EXAMPLES = {"hosts": 'hosts = ["node1", "node2"]', "devices_per_host": "devices_per_host = 8"}


def _remedy(error: str) -> str:
    """What to write in place of what msgspec refuses; empty where its words say it."""
    if unknown := re.search(r"unknown field `(\w+)`$", error):
        known = Cluster.__struct_fields__
        close = get_close_matches(unknown[1], known, n=1)
        return f"; did you mean {close[0]}?" if close else f"; there are {', '.join(known)}"
    if missing := re.search(r"missing required field `(\w+)`$", error):
        return f"; write {_EXAMPLES[missing[1]]}"
    if wrong := re.search(r"`\$\.(\w+)`$", error):
        return f"; it must be {_WORDS[wrong[1]]}" if wrong[1] in _WORDS else ""
    return ""
