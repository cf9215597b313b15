"""Memory on every GPU that its peers reach, and that outlives every program.

XLA allocates a kernel's buffers for each program, and zeroes its semaphores before each launch. So
peers may not access them before both devices have started, which XLA ensures by a barrier kernel
of its own. With counters that exist permanently, kernels synchronise their start themselves
(`handshake`), while they already work.

GPUs that kernels join share a heap, in which each has a slot, by its place among them in the job's
order. Slot `i` is at `address() + i * SLOT_BYTES`, for all GPUs of a process alike. Another set of
processes has another heap, even if some of them are the same.

| words of 4 bytes of a slot | are |
|---|---|
| 0 to 1023 | counters of the `handshake` |
| from `TURNS` on | for each sender and channel, how often both have exchanged (`posting`) |
| from `MAIL` on | for each sender, channel and half, `FLAGGED_WORDS` of messages with flags, and `BARE_WORDS` of such without |
| from `COUNTERS` on | semaphores that a kernel leaves at zero (`SemaphoreArray.restored`), of one kernel after another |
"""  # noqa: E501

from __future__ import annotations

import contextlib
import contextvars
import functools
import threading
from collections.abc import Generator

import jax

from stretto.distributed import settings
from stretto.distributed.devices import topology
from stretto.distributed.memory import heap_memory, sharing
from stretto.distributed.memory.heap_memory import SLOT_BYTES
from stretto.distributed.private_jax import store

MAX_SLOTS = 64
"""XLA connects at most 8 devices of a process, or 32 of several; the simulator has had 33."""
MAX_SENDERS = 8
"""Slots of a heap whose GPUs exchange messages."""
CHANNELS = 120
"""Blocks of a kernel that exchange messages, each with the same block of its peers."""
TURNS = 1024
MAIL = 2048
HALF_WORDS = (SLOT_BYTES // 4 - MAIL) // (MAX_SENDERS * CHANNELS * 2) // 512 * 512
"""Words of a block's room for one sender: a multiple of what 128 threads write at once."""
BARE_WORDS = 12 * 512
FLAGGED_WORDS = HALF_WORDS - BARE_WORDS
"""Of these, with flags (`messages`); bare ones follow: two rows of 6144 elements of 16 bits."""
WORDS = SLOT_BYTES // 4
COUNTERS = MAIL + MAX_SENDERS * CHANNELS * 2 * HALF_WORDS
"""Some 63,000 words up to the end of the slot."""
ADDRESS_WITHOUT_GPUS = heap_memory.PREFERRED_ADDRESS

__all__ = [
    "ADDRESS_WITHOUT_GPUS", "BARE_WORDS", "CHANNELS", "COUNTERS", "FLAGGED_WORDS", "HALF_WORDS",
    "MAIL", "MAX_SENDERS", "MAX_SLOTS", "SLOT_BYTES", "TURNS", "WORDS", "address", "is_wanted",
    "joining",
]  # fmt: skip


def is_wanted() -> bool:
    """Whether kernels use a heap, which `STRETTO_HEAP=0` forbids."""
    return settings.heap_is_wanted()


@contextlib.contextmanager
def joining(processes: tuple[int, ...]) -> Generator[None]:
    """Inside, kernels are lowered that join devices of `processes`, one for each slot, in order."""
    token = _joined.set(processes)
    try:
        yield
    finally:
        _joined.reset(token)


_joined = contextvars.ContextVar[tuple[int, ...]]("joined", default=())


def address() -> int:
    """Where slot 0 is of the devices that are `joining`. The first call for them makes their heap.

    Without GPUs, where kernels are only compiled, it is some address. Where kernels join several
    processes, each of them has to call it: they wait for each other.

    Raises:
      OSError: the driver refuses, or a process does not connect; also at each later call.
    """
    if not topology.devices_of_job("cuda"):
        return ADDRESS_WITHOUT_GPUS
    with _naming:
        heap = _heap_of(_joined.get())
    return heap.address()


_naming = threading.Lock()


@functools.cache
def _heap_of(processes: tuple[int, ...]) -> _Heap:
    return _Heap(processes)


class _Heap:
    """The heap of `processes`, made once, by the first thread that lowers a program."""

    def __init__(self, processes: tuple[int, ...]):
        self._processes = processes
        self._lock = threading.Lock()
        self._address: int | None = None
        self._error = ""

    def address(self) -> int:
        with self._lock:
            if self._error:
                raise OSError(self._error)
            if self._address is None:
                try:
                    self._address = self._make()
                except OSError as error:
                    self._error = (
                        f"the GPUs' shared memory cannot be made: {error} With STRETTO_HEAP=0, on"
                        " every process, kernels do without."
                    )
                    raise OSError(self._error) from error
            return self._address

    def _make(self) -> int:
        several = len(set(self._processes)) > 1
        return _of_processes(self._processes) if several else _of_process()


def _of_process() -> int:
    """Where the heap of this process alone is, made by the first thread that asks for it."""
    with _mapping:
        return _mapped()


_mapping = threading.Lock()


@functools.cache
def _mapped() -> int:
    devices = sorted(jax.local_devices(backend="cuda"), key=lambda device: device.id)
    return heap_memory.map_slots([device.local_hardware_id for device in devices])


def _of_processes(processes: tuple[int, ...]) -> int:
    """The heap of `processes`, which have one GPU each."""
    (device,) = jax.local_devices(backend="cuda")
    own, group = jax.process_index(), "stretto/heap/" + ",".join(map(str, processes))

    def share(handle: int) -> dict[int, int]:
        return sharing.exchange(handle, own, processes, group, store)

    base = heap_memory.map_slots_of_processes(device.local_hardware_id, own, processes, share)
    sharing.wait_for_all(own, processes, f"{group}/mapped", store)
    return base
