"""The meshes that benchmarks run over, and what GPUs these have."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from stretto.kernels.problem.machine import Machine

AXIS = "x"
"""The mesh axis of the devices of one node."""
NODE, GPU = "node", "gpu"
"""The mesh axes of several nodes, and of the devices within each."""


def mesh_of(devices: int) -> Mesh:
    """The first `devices` devices on one axis."""
    return Mesh(np.asarray(jax.devices()[:devices]), (AXIS,))


def mesh_of_nodes(nodes: int) -> Mesh:
    """All devices of the job, `nodes` equal shares of them along the first of two axes.

    Raises:
      ValueError: `nodes` does not divide the number of devices.
    """
    devices = np.asarray(jax.devices())
    if devices.size % nodes:
        raise ValueError(f"nodes={nodes} must divide the {devices.size} devices of the job.")
    return Mesh(devices.reshape(nodes, -1), (NODE, GPU))


def joined(mesh: Mesh, dimension: int = 0) -> PartitionSpec:
    """How the devices' arrays join into a global one: along `dimension`, in the mesh's order."""
    return PartitionSpec(*[None] * dimension, mesh.axis_names)


def architecture_of(mesh: Mesh) -> str:
    """ "sm_90" or the like; "" of devices that are no GPUs."""
    device = mesh.devices.flat[0]
    machine = Machine.of_kind(device.platform, device.device_kind)
    return machine.architecture if machine.platform == "gpu" else ""
