"""The memory of the `heap`: one allocation on each GPU, at addresses in a row."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence

from stretto.distributed.devices import cuda

PREFERRED_ADDRESS = 0x3000_0000_0000
SLOT_BYTES = 64 << 20
"""Size and distance of the slots, which `heap` divides: a multiple of the driver's granularity."""

_DEVICE = 1  # Values of the driver's enumerations.
_PINNED = 1
_READ_AND_WRITE = 3
_FILE_DESCRIPTOR = 1
_NO_FLAGS = ctypes.c_uint64(0)
_SIZE = ctypes.c_size_t(SLOT_BYTES)


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32_metadata", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


def map_slots(ordinals: Sequence[int]) -> int:
    """Gives each of this process's GPUs a slot, zeroed and open to all; returns where the first is.

    `ordinals` are the driver's numbers of the GPUs, in the order of the slots.
    """
    with cuda.context_of(ordinals[0]):
        base = _reserve(len(ordinals))
        for slot, ordinal in enumerate(ordinals):
            _map(_create(ordinal), base, slot)
        _open(base, len(ordinals), ordinals)
        _zero(base, len(ordinals))
    return base


def map_slots_of_processes(
    ordinal: int,
    own: int,
    processes: Sequence[int],
    share: Callable[[int], dict[int, int]],
) -> int:
    """The same where each of `processes` has one GPU; this one's is `ordinal`, its number `own`.

    `share` is called with a file descriptor that stands for this process's memory, and returns
    those of the others.
    """
    with cuda.context_of(ordinal):
        base = _reserve(len(processes))
        handle = _create(ordinal, shareable=True)
        _map(handle, base, processes.index(own), keep=True)
        _open(base + processes.index(own) * SLOT_BYTES, 1, [ordinal])
        _zero(base + processes.index(own) * SLOT_BYTES, 1)
        descriptor = _export(handle)
        try:
            for process, theirs in share(descriptor).items():
                _map(_import(theirs), base, processes.index(process))
                os.close(theirs)
        finally:
            os.close(descriptor)
        cuda.call("cuMemRelease", handle)
        _open(base, len(processes), [ordinal])
    return base


def _reserve(slots: int) -> int:
    base, total = ctypes.c_uint64(), ctypes.c_size_t(slots * SLOT_BYTES)
    wanted = ctypes.c_uint64(PREFERRED_ADDRESS)
    cuda.call("cuMemAddressReserve", ctypes.byref(base), total, _SIZE, wanted, _NO_FLAGS)
    return base.value


def _create(ordinal: int, *, shareable: bool = False) -> ctypes.c_uint64:
    handle = ctypes.c_uint64()
    kinds = _FILE_DESCRIPTOR if shareable else 0
    properties = _Properties(_PINNED, kinds, _Location(_DEVICE, ordinal))
    cuda.call("cuMemCreate", ctypes.byref(handle), _SIZE, ctypes.byref(properties), _NO_FLAGS)
    return handle


def _map(handle: ctypes.c_uint64, base: int, slot: int, *, keep: bool = False) -> None:
    """Maps an allocation, which then lives as long as that, unless the handle is to be kept."""
    at = ctypes.c_uint64(base + slot * SLOT_BYTES)
    cuda.call("cuMemMap", at, _SIZE, ctypes.c_size_t(0), handle, _NO_FLAGS)
    if not keep:
        cuda.call("cuMemRelease", handle)


def _open(base: int, slots: int, ordinals: Sequence[int]) -> None:
    """Lets the GPUs `ordinals` read and write the slots from `base` on."""
    access = (_Access * len(ordinals))(
        *(_Access(_Location(_DEVICE, ordinal), _READ_AND_WRITE) for ordinal in ordinals)
    )
    total = ctypes.c_size_t(slots * SLOT_BYTES)
    count = ctypes.c_size_t(len(ordinals))
    cuda.call("cuMemSetAccess", ctypes.c_uint64(base), total, access, count)


def _zero(base: int, slots: int) -> None:
    total = ctypes.c_size_t(slots * SLOT_BYTES)
    cuda.call("cuMemsetD8_v2", ctypes.c_uint64(base), ctypes.c_ubyte(0), total)
    cuda.call("cuCtxSynchronize")


def _export(handle: ctypes.c_uint64) -> int:
    descriptor = ctypes.c_int()
    out = ctypes.byref(descriptor)
    cuda.call("cuMemExportToShareableHandle", out, handle, _FILE_DESCRIPTOR, _NO_FLAGS)
    return descriptor.value


def _import(descriptor: int) -> ctypes.c_uint64:
    handle = ctypes.c_uint64()
    out, given = ctypes.byref(handle), ctypes.c_void_p(descriptor)
    cuda.call("cuMemImportFromShareableHandle", out, given, _FILE_DESCRIPTOR)
    return handle
