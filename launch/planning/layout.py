"""From a number of devices on some hosts to the processes of a job.

``-n`` counts devices. With one process per node each host gets one process that owns all the
devices the job uses there; with one process per GPU each device gets a process. With
``--devices-per-gpu`` several such processes take turns on a GPU, each of them a device: to test on
one GPU what runs on several. On a machine without GPUs a device is a CPU device: by default each
is a process of its own (gloo carries the collectives), with ``node`` they are virtual devices of
one process.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from stretto.launch.errors import LaunchError

Platform = Literal["cpu", "gpu"]
ProcessesPer = Literal["node", "gpu"] | int


@dataclass(frozen=True)
class HostDevices:
    """A host, by the name the launcher reaches it under, and how many devices it offers."""

    name: str
    num_devices: int


@dataclass(frozen=True)
class ProcessPlan:
    """One process of a job.

    ``device_ids`` are the local devices it owns, as CUDA numbers them under the host's
    ``CUDA_VISIBLE_DEVICES``; on a CPU only their number matters. Processes that share a GPU have
    the same.
    """

    process_id: int
    host: str
    local_process_id: int
    num_local_processes: int
    device_ids: tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """All processes of a job, ordered by process id; a host's processes are consecutive."""

    platform: Platform
    processes_per: ProcessesPer
    processes: tuple[ProcessPlan, ...]

    @property
    def num_devices(self) -> int:
        """How many devices the job uses, over all hosts."""
        return sum(len(process.device_ids) for process in self.processes)

    @property
    def num_gpus(self) -> int:
        """How many GPUs, or CPU devices, those are: fewer where devices share a GPU."""
        owned = {(p.host, device) for p in self.processes for device in p.device_ids}
        return len(owned)

    @property
    def hosts(self) -> dict[str, int]:
        """Number of processes on each host, in order of process id."""
        counts: dict[str, int] = {}
        for process in self.processes:
            counts[process.host] = counts.get(process.host, 0) + 1
        return counts


def default_processes_per(platform: Platform) -> Literal["node", "gpu"]:
    """GPUs of a node in one process (peers are plain pointers); a CPU device in each."""
    return "node" if platform == "gpu" else "gpu"


def share_devices(n: int | None, hosts: Sequence[HostDevices]) -> list[HostDevices]:
    """Fill hosts in their order with ``n`` devices, or take all that they offer.

    Raises:
      LaunchError: ``n`` is not positive, or more than the hosts offer together.
    """
    offered = sum(host.num_devices for host in hosts)
    if n is None:
        n = offered
    if n < 1:
        raise LaunchError(f"-n {n} must be at least 1; it counts the devices of the job")
    if n > offered:
        where = ", ".join(f"{host.name}:{host.num_devices}" for host in hosts)
        raise LaunchError(
            f"-n {n} asks for more than the slots of the hosts, {offered} in all ({where}); "
            f"pass -n {offered}, or give a host more: NAME:COUNT in --hosts, "
            "slots=COUNT in a hostfile"
        )
    used = []
    for host in hosts:
        take = min(n, host.num_devices)
        if take:
            used.append(HostDevices(host.name, take))
        n -= take
    return used


def take_devices(
    n: int | None, least: int | None, hosts: Sequence[HostDevices], lost: Collection[str]
) -> list[HostDevices]:
    """The hosts and devices of an attempt: as many as asked for, without lost hosts if it can be.

    Hosts beyond what ``n`` needs are spare: they take the place of lost ones. Where too few are
    left, a job that may do with ``least`` devices takes all of those, and any other job tries the
    lost hosts again.

    Args:
      n: devices of the job; all that the hosts offer if None.
      least: how few devices will do, or None for no fewer than ``n``.
      hosts: all that were named, in their order.
      lost: names of those that an earlier attempt has lost.

    Raises:
      LaunchError: ``n`` or ``least`` cannot be.
    """
    n = sum(host.num_devices for host in hosts) if n is None else n
    check_fewest(least, n)
    share_devices(n, hosts)  # refuses an n that the hosts could not serve if all were well
    well = [host for host in hosts if host.name not in lost]
    offered = sum(host.num_devices for host in well)
    if offered >= n:
        return share_devices(n, well)
    if least is not None and offered >= least:
        return share_devices(offered, well)
    return share_devices(n, [*well, *(host for host in hosts if host.name in lost)])


def check_fewest(least: int | None, n: int) -> None:
    """Raises LaunchError unless a job of ``n`` devices may do with ``least``."""
    if least is not None and not 1 <= least <= n:
        raise LaunchError(f"--min-devices {least} must be from 1 to the {n} devices of the job")


def plan(
    hosts: Sequence[HostDevices],
    platform: Platform,
    processes_per: ProcessesPer | None,
    devices_per_gpu: int = 1,
) -> Layout:
    """The processes for hosts whose ``num_devices`` are all used.

    Args:
      processes_per: ``"node"``, ``"gpu"``, or how many processes share the devices of each node.
      devices_per_gpu: how many of a host's devices, in their order, are on the same GPU.

    Raises:
      LaunchError: the devices of a host cannot be shared evenly, or devices share a GPU without a
        process each.
    """
    if devices_per_gpu != 1:
        _check_sharing(devices_per_gpu, platform, processes_per)
        processes_per = "gpu"
    per = default_processes_per(platform) if processes_per is None else processes_per
    processes: list[ProcessPlan] = []
    for host in hosts:
        devices = tuple(range(host.num_devices))
        count = {"node": 1, "gpu": len(devices)}[per] if isinstance(per, str) else per
        if count < 1 or len(devices) % count:
            raise LaunchError(
                f"--processes-per {per} cannot share the {len(devices)} devices of {host.name} "
                "evenly; choose a divisor, node or gpu"
            )
        share = len(devices) // count
        groups = [devices[i : i + share] for i in range(0, len(devices), share)]
        for local_id, group in enumerate(groups):
            ids = tuple(device // devices_per_gpu for device in group)
            processes.append(ProcessPlan(len(processes), host.name, local_id, len(groups), ids))
    return Layout(platform, per, tuple(processes))


def _check_sharing(
    devices_per_gpu: int, platform: Platform, processes_per: ProcessesPer | None
) -> None:
    option = f"--devices-per-gpu {devices_per_gpu}"
    if devices_per_gpu < 1:
        raise LaunchError(f"{option} must be at least 1")
    if platform != "gpu":
        raise LaunchError(f"{option} is for jobs on GPUs; leave it out: on CPUs any -n will do")
    if processes_per not in (None, "gpu"):
        raise LaunchError(
            f"{option} gives each device a process; drop --processes-per {processes_per}"
        )


def one_host(
    n: int | None,
    num_gpus: int,
    cuda_visible_devices: str | None,
    devices_per_gpu: int = 1,
) -> HostDevices:
    """This machine with the devices a job of ``-n n`` uses.

    With GPUs, ``n`` defaults to as many as they offer and may not be more. Without, it defaults to
    1 and is free, since CPU devices cost nothing but time.

    Raises:
      LaunchError: ``n`` is not positive, or more than the GPUs.
    """
    if n is not None and n < 1:
        raise LaunchError(f"-n {n} must be at least 1; it counts the devices of the job")
    if num_gpus == 0:
        return HostDevices("localhost", n or 1)
    offered = num_gpus * devices_per_gpu
    if n is not None and n > offered:
        limit = (
            f" under CUDA_VISIBLE_DEVICES={cuda_visible_devices}" if cuda_visible_devices else ""
        )
        raise LaunchError(
            f"-n {n} is more than {_offer(num_gpus, devices_per_gpu)} of this machine{limit}; pass "
            f"-n {offered}, add hosts, set JAX_PLATFORMS=cpu to run on {n} CPU devices, or, for "
            f"tests, --devices-per-gpu {-(-n // num_gpus)}"
        )
    return HostDevices("localhost", n or offered)


def _offer(num_gpus: int, devices_per_gpu: int) -> str:
    gpus = f"the {num_gpus} GPU{'s' * (num_gpus > 1)}"
    return gpus if devices_per_gpu == 1 else f"{devices_per_gpu} on each of {gpus}"
