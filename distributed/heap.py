"""Memory on every GPU that its peers reach, and that outlives every program.

XLA places a kernel's buffers anew for each program, and zeroes its semaphores before each launch.
So nothing of a kernel's may be touched by a peer before the two have met, and XLA has them meet in
a kernel of its own (a barrier). Counters that are always there let kernels meet by themselves
(`handshake`), while they already work.

GPUs that kernels join share a heap, in which each has a slot, by its place among them in the job's
order. Slot `i` is at `address() + i * SLOT_BYTES`, for all GPUs of a process alike.
"""

from __future__ import annotations

import functools
import threading

import jax

from stretto.distributed import heap_memory, jax_store, settings, sharing, topology
from stretto.distributed.heap_memory import SLOT_BYTES

MAX_SLOTS = 32
"""XLA connects at most 8 devices of a process, or 32 of several."""
ADDRESS_WITHOUT_GPUS = heap_memory.PREFERRED_ADDRESS

__all__ = ["ADDRESS_WITHOUT_GPUS", "MAX_SLOTS", "SLOT_BYTES", "address", "is_wanted"]


def is_wanted() -> bool:
    """Whether kernels use a heap, which `STRETTO_HEAP=0` forbids."""
    return settings.heap_is_wanted()


def address() -> int:
    """Where slot 0 of this process's devices is. The first call makes the heap.

    Without GPUs, where kernels are only compiled, it is some address. Where kernels join several
    processes, each of them has to call it: they wait for each other.

    Raises:
      OSError: the driver refuses, or a process of this node does not come.
    """
    devices = topology.devices_of_job("cuda")
    if not devices:
        return ADDRESS_WITHOUT_GPUS
    domains = topology.domains_of(devices)
    own = next(d for d in devices if d.process_index == jax.process_index())
    domain = domains[devices.index(own)]
    members = [d for d, other in zip(devices, domains, strict=True) if other == domain]
    with _lock:  # Programs may be lowered by several threads.
        if domain.process is not None or len(members) == 1:
            return _of_process()
        return _of_node(tuple(d.process_index for d in members), own.local_hardware_id)


_lock = threading.Lock()


@functools.cache
def _of_process() -> int:
    devices = sorted(jax.local_devices(backend="cuda"), key=lambda device: device.id)
    return heap_memory.map_slots([device.local_hardware_id for device in devices])


@functools.cache
def _of_node(processes: tuple[int, ...], ordinal: int) -> int:
    """The heap of `processes`, which have one GPU each, of which this one's is `ordinal`."""
    group = "stretto/heap/" + ",".join(map(str, processes))
    own = jax.process_index()

    def share(handle: int) -> dict[int, int]:
        return sharing.exchange(handle, own, processes, group, jax_store)

    base = heap_memory.map_slots_of_processes(ordinal, own, processes, share)
    sharing.wait_for_all(own, processes, f"{group}/mapped", jax_store)
    return base
