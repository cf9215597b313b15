"""Which hosts a job runs on, and on what: this machine, those that are named, or Slurm's."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from stretto.launch.environment import CUDA_VISIBLE_DEVICES
from stretto.launch.errors import LaunchError
from stretto.launch.planning import slurm
from stretto.launch.planning.cluster import Cluster
from stretto.launch.planning.gpus import usable_gpus
from stretto.launch.planning.hosts import parse_hostfile, parse_hosts
from stretto.launch.planning.layout import (
    HostDevices,
    Platform,
    check_fewest,
    one_host,
    take_devices,
)
from stretto.launch.planning.options import RunOptions
from stretto.launch.planning.platforms import asked_platform
from stretto.launch.planning.survey import is_this_host

Survey = Callable[[Sequence[str]], Mapping[str, int]]
_SAY = "pass --platform cpu to run on the CPU"


@dataclass(frozen=True)
class Chosen:
    """Hosts with the devices this job uses on each, and what those devices are.

    ``why`` is the source of the platform, if no option chose it.
    """

    hosts: list[HostDevices]
    platform: Platform
    why: str = ""


def choose_hosts(
    options: RunOptions,
    cluster: Cluster | None,
    environ: Mapping[str, str],
    survey: Survey,
    lost: Collection[str] = (),
) -> Chosen:
    """From ``--hostfile``, ``--hosts``, the cluster file, the Slurm allocation, or this machine.

    A single host that is this machine is called ``localhost``, whatever its name.

    Args:
      environ: of the job's processes, as far as this machine knows it.
      survey: gives the number of devices that the GPUs of some hosts offer the job, of each host;
        asked only where neither the command line nor the cluster file says.
      lost: hosts that an earlier attempt has lost; the last to be taken again.

    Raises:
      LaunchError: the options contradict each other, ask for more than there is, or what there
        is cannot be told.
    """
    given = [n for n in ("hostfile", "hosts", "cluster") if getattr(options, n) is not None]
    if len(given) > 1:
        names = " and ".join(f"--{name}" for name in given)
        raise LaunchError(f"{names} both name hosts; give one of them")
    asked = asked_platform(options.platform, cluster.platform if cluster else None, environ)
    allocated = slurm.allocated_hosts(environ)
    if given:
        chosen = _named(options, cluster, asked, survey, lost)
    elif allocated and not _is_this_machine(allocated):
        chosen = _allocated(allocated, asked, environ, survey)
    else:
        chosen = _this_machine(options, asked, environ, in_slurm=bool(allocated))
        check_fewest(options.min_devices, chosen.hosts[0].num_devices)
        return chosen
    used = take_devices(options.num_devices, options.min_devices, chosen.hosts, lost)
    if _is_this_machine([host.name for host in used]):
        used = [HostDevices("localhost", used[0].num_devices)]
    return replace(chosen, hosts=used)


def named_hosts(options: RunOptions, cluster: Cluster | None) -> list[str]:
    """The hosts that the command line or the cluster file names; empty if neither does.

    Raises:
      LaunchError: they cannot be read.
    """
    if options.hostfile is None and options.hosts is None and cluster is None:
        return []
    return [host.name for host in _read_hosts(options, cluster, 1)]


def _named(
    options: RunOptions,
    cluster: Cluster | None,
    asked: Platform | None,
    survey: Survey,
    lost: Collection[str],
) -> Chosen:
    if cluster is not None:
        platform = asked or cluster.platform
        return Chosen(_read_hosts(options, cluster, cluster.devices_per_host), platform)
    hosts = _read_hosts(options, cluster, 1)
    all_say = hosts == _read_hosts(options, cluster, 2)
    if asked == "cpu" or (asked == "gpu" and all_say):
        return Chosen(hosts, asked)
    names = [host.name for host in hosts]
    gpus = survey([name for name in names if name not in lost] or names)
    platform, why = platform_of(gpus, asked)
    if platform == "gpu":
        gpus = dict.fromkeys(names, max(gpus.values())) | dict(gpus)  # lost ones like the others
        hosts = _read_hosts(options, cluster, gpus)
        for host in hosts:
            if host.num_devices > gpus[host.name]:
                has = f"has {gpus[host.name]} GPUs that a job can use"
                if options.devices_per_gpu != 1:
                    has = f"offers {gpus[host.name]} devices, {options.devices_per_gpu} on each GPU"
                raise LaunchError(
                    f"host {host.name} {has}, and not {host.num_devices}; correct its slots, or "
                    f"{_SAY}"
                )
    return Chosen(hosts, platform, why)


def _allocated(
    hosts: list[str], asked: Platform | None, environ: Mapping[str, str], survey: Survey
) -> Chosen:
    why = ""
    if asked != "cpu":
        gpus = survey(hosts)
        asked, why = platform_of(gpus, asked)
        if asked == "gpu":
            return Chosen([HostDevices(name, gpus[name]) for name in hosts], "gpu", why)
    counts = slurm.tasks_of_hosts(environ, len(hosts))
    found = [HostDevices(name, count) for name, count in zip(hosts, counts, strict=True)]
    return Chosen(found, "cpu", why)


def _this_machine(
    options: RunOptions, asked: Platform | None, environ: Mapping[str, str], *, in_slurm: bool
) -> Chosen:
    limit = environ.get(CUDA_VISIBLE_DEVICES)
    tasks = slurm.tasks_of_hosts(environ, 1)[0] if in_slurm else 1
    n = tasks if options.num_devices is None else options.num_devices
    on_cpu = Chosen([one_host(n, 0, limit)], "cpu")
    if asked == "cpu":
        return on_cpu
    found = usable_gpus({**environ, "JAX_PLATFORMS": ""})
    if found:
        why = "" if asked else f"this machine has {len(found)} ({found[0].name})"
        host = one_host(options.num_devices, len(found), limit, options.devices_per_gpu)
        return Chosen([host], "gpu", why)
    hidden = limit is not None
    none = (
        f"{CUDA_VISIBLE_DEVICES}={limit} hides all GPUs"
        if hidden
        else ("this machine has no NVIDIA GPU (no nvidia-smi, no /dev/nvidia*)")
    )
    if asked == "gpu":
        raise LaunchError(f"{none}, and --platform or JAX_PLATFORMS asks for them; {_SAY}")
    if in_slurm and (count := slurm.gpus_per_host(environ)):
        raise LaunchError(f"{none}, and Slurm gave this job {count}; ask its staff, or {_SAY}")
    return replace(on_cpu, why=none)


def platform_of(gpus: Mapping[str, int], asked: Platform | None) -> tuple[Platform, str]:
    """What hosts with so many GPUs run a job on, and why, if nobody asked for it.

    Raises:
      LaunchError: some have GPUs and some have none, or GPUs were asked for and a host has none.
    """
    without = [host for host, count in gpus.items() if not count]
    if not without:
        return "gpu", "" if asked else "the hosts have them"
    names = ", ".join(without)
    if asked == "gpu" or len(without) < len(gpus):
        raise LaunchError(
            f"no NVIDIA GPU that a job can use on {names}; leave them out, or {_SAY} of all hosts"
        )
    return "cpu", f"no NVIDIA GPU on {names}"


def _is_this_machine(hosts: Sequence[str]) -> bool:
    return len(hosts) == 1 and is_this_host(hosts[0])


def _read_hosts(
    options: RunOptions, cluster: Cluster | None, default_devices: int | Mapping[str, int]
) -> list[HostDevices]:
    if cluster is not None:
        text, source = "\n".join(cluster.hosts), f"--cluster {options.cluster}"
        return parse_hostfile(text, source, default_devices)
    if options.hostfile is not None:
        return parse_hostfile(_read(options.hostfile), str(options.hostfile), default_devices)
    return parse_hosts(options.hosts or "", default_devices)


def _read(hostfile: Path) -> str:
    try:
        return hostfile.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise LaunchError(f"--hostfile {hostfile}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise LaunchError(
            f"--hostfile {hostfile} is no text (UTF-8); write a host a line, such as: node1 slots=4"
        ) from None
