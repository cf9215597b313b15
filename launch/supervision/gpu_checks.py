"""An agent checks that its process's GPUs exist, and binds it to the cores beside them."""

import socket
from collections.abc import Mapping

from stretto.launch import environment
from stretto.launch.errors import LaunchError
from stretto.launch.planning.gpus import usable_gpus
from stretto.launch.process.binding import cores_beside, keep_to
from stretto.launch.supervision.wire import Message


def take_gpus(message: Message, environ: Mapping[str, str]) -> str | None:
    """Why the job cannot be on this host as it was planned, or None.

    Args:
      message: ``prepare``, with the process's ``devices``, the ``cuda_visible_devices`` that was
        sent along (None for the host's own) and ``bind``.
      environ: the agent's, whose worker inherits the cores that it is kept to.
    """
    sent = message["cuda_visible_devices"]
    limit = {} if sent is None else {environment.CUDA_VISIBLE_DEVICES: sent}
    name = f"host {socket.gethostname()}"
    try:
        found = usable_gpus({**environ, "JAX_PLATFORMS": "", **limit}, where=name)
    except LaunchError as error:
        return f"{name}: {error}"
    last = max(message["devices"])
    if last >= len(found):
        return (
            f"{name} has {len(found)} GPUs that a job can use, and number {last} was planned "
            "there; correct its slots, or pass --platform cpu to run on the CPU"
        )
    if message["bind"] == "none":
        return None
    cores = cores_beside([found[device] for device in message["devices"]])
    if not (cores and keep_to(cores)) and message["bind"] == "numa":
        return (
            f"{name} does not say which cores are beside its GPUs (numa_node in "
            "/sys/bus/pci/devices), or this job may use none of those; drop --bind numa"
        )
    return None
