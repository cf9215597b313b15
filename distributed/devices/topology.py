"""Which devices a kernel can join: those of a node, as far as the job's processes allow.

**A node** is what NVLink spans. Devices are of one node where, in this order,

1. `STRETTO_DEVICES_PER_NODE` is set: that many consecutive devices each. It is there for tests:
   one host represents several nodes.
2. the platform gives them the same `slice_index`. XLA gives the GPUs of one host the same, unless
   `jax.distributed.initialize(slice_index=...)` says otherwise.
3. they are of one process.

**A kernel** joins devices of one process, or of several that have one device each: XLA knows no
other way for a device to reach another one's memory. So devices of one node that belong to several
processes of several devices do not reach each other, although NVLink would let them.

While a program is traced its devices are not known. They are taken to be those of the job in their
order, which is the only order that kernels take; a kernel looks at the mesh itself once it is
lowered (`clique`).
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import numpy as np

from stretto.distributed import settings


@dataclasses.dataclass(frozen=True)
class Domain:
    """A set of devices that kernels can join: a node, or one process's devices on it.

    `process` is None where each process of the node has one device.
    """

    node: int
    process: int | None


@dataclasses.dataclass(frozen=True)
class Split:
    """The axes of a team as nodes see them, in the team's order.

    Along `inner` devices reach each other in a kernel; along `outer` they belong to different
    domains. A team within one domain has no `outer` axes.
    """

    outer: tuple[Hashable, ...]
    inner: tuple[Hashable, ...]


def devices_of_job(platform: str) -> list[Any]:
    """All devices of a platform in the order of their ids; none where it has none."""
    try:
        return sorted(jax.devices(platform), key=lambda device: device.id)
    except RuntimeError:
        return []


def domains_of(devices: Sequence[Any]) -> list[Domain]:
    """The domain of each of `devices`, which are the job's first, in order."""
    processes = [device.process_index for device in devices]
    counts = collections.Counter(processes)
    per_node = settings.devices_per_node()
    domains = []
    for i, (device, process) in enumerate(zip(devices, processes, strict=True)):
        if per_node is not None:
            node = i // per_node
        else:
            node = getattr(device, "slice_index", None)
            node = process if node is None else node
        domains.append(Domain(node, process if counts[process] > 1 else None))
    return domains


def domains_of_mesh() -> np.ndarray | None:
    """The domains of the enclosing mesh's devices, in its shape; None where nothing is known.

    Devices that are not there, for which a program is only compiled, count as one domain.
    """
    mesh = jax.sharding.get_abstract_mesh()
    device = mesh.abstract_device
    platform = device.platform if device is not None else jax.default_backend()
    devices = devices_of_job(platform)[: mesh.size]
    found = np.empty(mesh.size, object)
    if len(devices) == mesh.size:
        found[:] = domains_of(devices)
    elif (per_node := settings.devices_per_node()) is not None:
        found[:] = [Domain(i // per_node, None) for i in range(mesh.size)]
    else:
        return None
    return found.reshape(mesh.axis_sizes)


def is_within_domains(domains: np.ndarray, dimensions: Sequence[int]) -> bool:
    """Whether devices that differ only along `dimensions` share a domain, wherever they are."""
    return _first_crossing(domains, dimensions) is None


def split(axes: tuple[Hashable, ...]) -> Split:
    """The axes of a team that kernels can take, `inner`: the most that end `axes`.

    With no axes at the end that a kernel could take, `inner` is empty.
    """
    domains = domains_of_mesh() if axes else None
    if domains is None:
        return Split((), axes)
    names = jax.sharding.get_abstract_mesh().axis_names
    dimensions = [names.index(name) for name in axes]
    # No axes at all lie within a domain, so there is a first.
    first = next(i for i in range(len(axes) + 1) if is_within_domains(domains, dimensions[i:]))
    return Split(axes[:first], axes[first:])


def obstacle(axes: tuple[Hashable, ...]) -> str | None:
    """Why no kernel can join the devices along `axes` of the enclosing mesh, or None if one can."""
    domains = domains_of_mesh()
    if domains is None:
        return None
    mesh = jax.sharding.get_abstract_mesh()
    devices = devices_of_job(mesh.abstract_device.platform) if mesh.abstract_device else []
    return describe_crossing(domains, [mesh.axis_names.index(a) for a in axes], axes, devices)


def describe_crossing(
    domains: np.ndarray,
    dimensions: Sequence[int],
    axes: tuple[Hashable, ...],
    devices: Sequence[Any],
) -> str | None:
    """Names the first pair of devices along `axes` that no kernel joins; None without one.

    Args:
      domains: of the mesh's devices, in its shape.
      dimensions: of the mesh that `axes` are.
      axes: the team's, for the message.
      devices: the mesh's, in order, for the message; their ids are taken if they are not known.
    """
    crossing = _first_crossing(domains, dimensions)
    if crossing is None:
        return None
    pair = [
        f"device {position} ({_describe(domains.flat[position], devices, position)})"
        for position in crossing
    ]
    one, other = (domains.flat[position] for position in crossing)
    cause = (
        "a kernel joins devices of one process, or of processes of one device each"
        if one.node == other.node
        else "NVLink joins devices of one node only"
    )
    return f"axis {names_of(axes)} joins {pair[0]} and {pair[1]}, and {cause}."


def names_of(axes: tuple[Hashable, ...]) -> str:
    """Axes as a message names them."""
    return repr(axes[0]) if len(axes) == 1 else repr(axes)


def _first_crossing(domains: np.ndarray, dimensions: Sequence[int]) -> tuple[int, int] | None:
    """Positions of two devices that differ along `dimensions` alone and share no domain."""
    positions = np.arange(domains.size).reshape(domains.shape)
    others = [d for d in range(domains.ndim) if d not in dimensions]
    team = int(np.prod([domains.shape[d] for d in dimensions]))
    for members in positions.transpose(*others, *dimensions).reshape(-1, team):
        for member in members[1:]:
            if domains.flat[member] != domains.flat[members[0]]:
                return int(members[0]), int(member)
    return None


def _describe(domain: Domain, devices: Sequence[Any], position: int) -> str:
    process = devices[position].process_index if position < len(devices) else domain.process
    where = f"node {domain.node}"
    return where if process is None else f"process {process}, {where}"
