"""The clique of a kernel: the devices of a mesh that XLA connects for it on this process.

A kernel talks along some axes of the mesh, but a program is compiled once for all devices of a
process. So its clique is the part of the mesh that this process sees: its own devices or, where
every process has one, those of its node. Every team of the process lies within it.

XLA connects devices for its own collectives, too, and refuses a program in which the same devices
are connected once as one group of several (its own, over all nodes) and once as the only one (a
kernel's, which knows of no other). The same devices in another order count as others: so where a
job has several cliques, kernels count theirs from the end (`team.places_reversed`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from stretto.distributed.devices import topology
from stretto.distributed.devices.topology import Domain
from stretto.distributed.private_jax import meshes


@dataclasses.dataclass(frozen=True)
class Clique:
    """A box of a mesh, with the mesh's axes.

    Attributes:
      axis_names, shape: of the box.
      members: positions of its devices in the mesh, row-major.
      processes: the process of each.
    """

    axis_names: tuple[Hashable, ...]
    shape: tuple[int, ...]
    members: tuple[int, ...]
    processes: tuple[int, ...]

    def reversed(self) -> Clique:
        """The same devices, counted from the end along every axis."""
        return dataclasses.replace(self, members=self.members[::-1], processes=self.processes[::-1])


def are_several() -> bool:
    """Whether this job has more than one clique."""
    devices = jax.devices()
    domains = np.empty(len(devices), object)
    domains[:] = topology.domains_of(devices)
    return len(_cliques(domains, devices)) > 1


def this_process(mesh: Mesh) -> int:
    """The process that `mesh` is seen from."""
    return mesh.devices.flat[0].client.process_index()


def check_order(mesh: Mesh, name: str) -> None:
    """Raises NotImplementedError for a mesh whose order is not the devices' own.

    A kernel names its peers by their place in the mesh and XLA by their ids; JAX translates
    nothing between the two, so a permuted mesh would read the wrong peer's rows.
    """
    if (obstacle := order_obstacle(mesh)) is not None:
        raise NotImplementedError(f"kernel {name}: {obstacle} Or pass backend='xla'.")


def order_obstacle(mesh: Mesh) -> str | None:
    """Why no kernel serves a mesh of devices in this order, or None if some may."""
    ids = [device.id for device in mesh.devices.flat]
    return _order_obstacle(ids, mesh.devices.flat[0].client.devices())


def order_obstacle_of_trace() -> str | None:
    """The same for the enclosing mesh while a program is traced, as far as it is known."""
    ids = meshes.unordered_ids()
    device = jax.sharding.get_abstract_mesh().abstract_device
    if ids is None or device is None:
        return None
    return _order_obstacle(list(ids), topology.devices_of_job(device.platform))


def _order_obstacle(ids: list[int], devices: Sequence[Any]) -> str | None:
    wanted = sorted(device.id for device in devices)[: len(ids)]
    if ids == wanted:
        return None
    return (
        f"the mesh holds its devices in the order {ids}; it must be {wanted}. Make the mesh with"
        " jax.make_mesh, of the first devices."
    )


def clique_of(mesh: Mesh, axes: tuple[Hashable, ...], name: str) -> Clique:
    """The clique of kernel `name`, which communicates along `axes` of `mesh`, on this process.

    Raises:
      NotImplementedError: the mesh is permuted, a team has members that no kernel can join, or
        the devices of the cliques are not equal boxes of the mesh. The same on every process.
    """
    check_order(mesh, name)
    devices = list(mesh.devices.flat)
    domains = np.empty(mesh.devices.shape, object)
    domains.flat[:] = topology.domains_of(devices)
    dimensions = [mesh.axis_names.index(axis) for axis in axes]
    crossing = topology.describe_crossing(domains, dimensions, axes, devices)
    if crossing is not None:
        raise NotImplementedError(f"kernel {name}: {crossing} Pass backend='xla'.")
    cliques = _cliques(domains, devices)
    shapes = {_box(members, mesh.devices.shape) for members in cliques.values()}
    if len(shapes) > 1 or None in shapes:
        parts = "; ".join(f"{list(m)}" for m in cliques.values())
        raise NotImplementedError(
            f"kernel {name}: the devices that reach each other, {parts}, are not equal boxes of the"
            f" mesh of shape {mesh.devices.shape}. Make the mesh with the nodes along its first"
            " axes, or pass backend='xla'."
        )
    own = this_process(mesh)
    (members,) = (
        m for m in cliques.values() if own in (devices[position].process_index for position in m)
    )
    (shape,) = shapes
    processes = tuple(devices[position].process_index for position in members)
    return Clique(tuple(mesh.axis_names), shape, tuple(members), processes)  # pyright: ignore[reportArgumentType]


def _cliques(domains: np.ndarray, devices: list[Any]) -> dict[Any, list[int]]:
    """The positions of the mesh, by what one program's kernels can see of it.

    A process is one program, also where tests make several nodes of its devices.
    """
    found: dict[Any, list[int]] = {}
    domain: Domain
    for position, domain in enumerate(domains.flat):
        alone = domain.process is None
        key = ("node", domain.node) if alone else ("process", devices[position].process_index)
        found.setdefault(key, []).append(position)
    return found


def _box(positions: list[int], shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape of the box of a mesh that is made of `positions`, None if they are none."""
    coordinates = np.unravel_index(positions, shape)
    sizes = tuple(len(set(along.tolist())) for along in coordinates)
    return sizes if int(np.prod(sizes)) == len(positions) else None
