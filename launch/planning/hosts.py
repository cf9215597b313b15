"""Which hosts a job runs on: this machine, a hostfile, a list, a cluster file, or Slurm's."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from stretto.launch.errors import LaunchError
from stretto.launch.planning import network, slurm
from stretto.launch.planning.cluster import Cluster
from stretto.launch.planning.gpus import Gpu
from stretto.launch.planning.layout import HostDevices, Platform, one_host, share_devices
from stretto.launch.planning.options import RunOptions

_SLOTS = re.compile(r"^(?P<key>max[_-]slots|slots)\s*=\s*(?P<value>\S+)$")


def parse_hostfile(text: str, source: str, default_devices: int) -> list[HostDevices]:
    """Hosts of a hostfile, a line each: ``NAME [slots=N] [max_slots=N]``.

    ``#`` starts a comment; blank lines, tabs and CRLF are fine; ``NAME`` may be ``user@host`` or
    an IPv6 address. A host named again adds to its slots. ``NAME:N`` is MPICH's way to say slots.

    Args:
      text: the file's content.
      source: its name, for errors.
      default_devices: slots of a host that names none.

    Raises:
      LaunchError: a line that means nothing; names file and line.
    """
    slots: dict[str, int] = {}
    limits: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = re.sub(r"\s*=\s*", "=", line.partition("#")[0]).split()
        if not words:
            continue
        where = f"{source}, line {number}"
        name, count = _name_and_count(words[0], where)
        for word in words[1:]:
            match = _SLOTS.match(word)
            if match is None:
                raise LaunchError(f"{where}: {word!r} is not slots=N or max_slots=N")
            value = _positive(match["value"], word, where)
            if match["key"] == "slots":
                count = value
            else:
                limits[name] = value
        slots[name] = slots.get(name, 0) + (default_devices if count is None else count)
    if not slots:
        raise LaunchError(f"{source} names no host; write one a line, such as: node1 slots=4")
    return [HostDevices(name, min(n, limits.get(name, n))) for name, n in slots.items()]


def parse_hosts(text: str, default_devices: int) -> list[HostDevices]:
    """Hosts of ``--hosts a:4,b:4``."""
    lines = "\n".join(part.strip() for part in text.split(","))
    return parse_hostfile(lines, f"--hosts {text}", default_devices)


def _name_and_count(word: str, where: str) -> tuple[str, int | None]:
    """A host and the count of ``host:4`` or ``[IPv6]:4``; a bare IPv6 address has no count."""
    if word.startswith("["):
        name, bracket, rest = word[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise LaunchError(f"{where}: {word!r} is not [ADDRESS] or [ADDRESS]:N")
        return name, _positive(rest[1:], word, where) if rest else None
    if word.count(":") == 1:
        name, _, count = word.partition(":")
        return name, _positive(count, word, where)
    return word, None


def _positive(text: str, word: str, where: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise LaunchError(f"{where}: {word!r} needs a number of at least 1")
    return int(text)


@dataclass(frozen=True)
class Chosen:
    """Hosts with the devices this job uses on each, and what those devices are."""

    hosts: list[HostDevices]
    platform: Platform


def choose_hosts(
    options: RunOptions,
    cluster: Cluster | None,
    environ: Mapping[str, str],
    visible: tuple[Gpu, ...],
) -> Chosen:
    """From ``--hostfile``, ``--hosts``, the cluster file, the Slurm allocation, or this machine.

    Unless a cluster file says otherwise, other hosts are taken to have the devices of this
    machine. A single host that is this machine is called ``localhost``, whatever its name.

    Args:
      visible: the GPUs that a job may use here.

    Raises:
      LaunchError: the options contradict each other, or ask for more than there is.
    """
    platform: Platform = "gpu" if visible else "cpu"
    per_host = len(visible) or 1
    given = [name for name in ("hostfile", "hosts", "cluster") if getattr(options, name)]
    if len(given) > 1:
        names = " and ".join(f"--{name}" for name in given)
        raise LaunchError(f"{names} both name hosts; give one of them")
    allocated = slurm.allocated_hosts(environ)
    if cluster is not None:
        platform, per_host = cluster.platform, cluster.devices_per_host
        hosts = parse_hostfile("\n".join(cluster.hosts), f"--cluster {options.cluster}", per_host)
    elif options.hostfile is not None:
        hosts = parse_hostfile(_read(options.hostfile), str(options.hostfile), per_host)
    elif options.hosts is not None:
        hosts = parse_hosts(options.hosts, per_host)
    elif allocated and allocated != [network.host_name()]:
        gpus = slurm.devices_per_host(environ)
        platform = "gpu" if gpus or visible else "cpu"
        hosts = [HostDevices(name, gpus or per_host) for name in allocated]
    else:
        limit = environ.get("CUDA_VISIBLE_DEVICES")
        return Chosen([one_host(options.num_devices, len(visible), limit)], platform)
    used = share_devices(options.num_devices, hosts)
    if [host.name for host in used] == [network.host_name()]:
        used = [HostDevices("localhost", used[0].num_devices)]
    return Chosen(used, platform)


def _read(hostfile: Path) -> str:
    try:
        return hostfile.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise LaunchError(f"--hostfile {hostfile}: {error.strerror}") from None
