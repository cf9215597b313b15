"""The calls that make the heap, on a driver that only keeps account."""

from __future__ import annotations

import contextlib
import ctypes
import os

import pytest

from stretto.distributed.devices import cuda
from stretto.distributed.memory import heap_memory
from stretto.distributed.memory.heap_memory import PREFERRED_ADDRESS, SLOT_BYTES


def number(x):
    return getattr(x, "value", x)


class Driver:
    """Addresses that are reserved, what is mapped where, who may use it, and what is zero."""

    def __init__(self, refusing=""):
        self.refusing = refusing
        self.reserved = {}
        self.allocations = {}
        self.mapped = {}
        self.open_to = {}
        self.zeroed = []
        self.handles = 0

    def call(self, function, *arguments):
        if function == self.refusing:
            raise OSError(f"{function} failed with CUDA error 801, CUDA_ERROR_NOT_SUPPORTED.")
        getattr(self, function)(*arguments)

    def cuMemAddressReserve(self, out, total, alignment, wanted, flags):
        assert (
            number(wanted) % number(alignment) == number(total) % SLOT_BYTES == number(flags) == 0
        )
        out._obj.value = number(wanted)
        self.reserved[number(wanted)] = number(total)

    def cuMemCreate(self, out, size, properties, flags):
        assert number(size) == SLOT_BYTES
        given = properties._obj
        assert given.type == 1 and given.location.type == 1
        self.handles += 1
        out._obj.value = self.handles
        self.allocations[self.handles] = (given.location.id, given.handle_types)

    def cuMemMap(self, at, size, offset, handle, flags):
        (base,) = self.reserved
        assert base <= number(at) and number(at) + number(size) <= base + self.reserved[base]
        assert number(at) not in self.mapped
        self.mapped[number(at)] = number(handle)

    def cuMemRelease(self, handle):
        assert number(handle) in self.mapped.values(), "released before it is mapped"

    def cuMemSetAccess(self, at, total, access, count):
        for place in range(number(at), number(at) + number(total), SLOT_BYTES):
            assert place in self.mapped, "opened before it is mapped"
            assert all(access[i].flags == 3 for i in range(number(count)))
            self.open_to[place] = [access[i].location.id for i in range(number(count))]

    def cuMemsetD8_v2(self, at, value, total):
        assert number(value) == 0
        self.zeroed += range(number(at), number(at) + number(total), SLOT_BYTES)
        assert all(place in self.open_to for place in self.zeroed), "not open yet"

    def cuMemExportToShareableHandle(self, out, handle, kind, flags):
        assert kind == 1 and self.allocations[number(handle)][1] == 1
        out._obj.value = os.memfd_create("handle")

    def cuMemImportFromShareableHandle(self, out, descriptor, kind):
        os.fstat(number(descriptor))  # It is open.
        self.handles += 1
        out._obj.value = self.handles

    def cuCtxSynchronize(self):
        pass


@pytest.fixture
def driver(monkeypatch):
    made = Driver()
    monkeypatch.setattr(cuda, "call", lambda *arguments: made.call(*arguments))
    monkeypatch.setattr(cuda, "context_of", lambda ordinal: contextlib.nullcontext())
    return made


def slots(count):
    return [PREFERRED_ADDRESS + i * SLOT_BYTES for i in range(count)]


def test_each_gpu_has_a_slot_that_all_reach(driver):
    ordinals = [2, 0, 3]
    assert heap_memory.map_slots(ordinals) == PREFERRED_ADDRESS
    assert [driver.allocations[driver.mapped[at]][0] for at in slots(3)] == ordinals
    assert driver.open_to == dict.fromkeys(slots(3), ordinals)
    assert sorted(driver.zeroed) == slots(3)


def test_a_process_for_each(driver):
    shared = []

    def share(descriptor):
        os.fstat(descriptor)
        shared.append(driver.zeroed[:])
        return {4: os.memfd_create("of 4"), 6: os.memfd_create("of 6")}

    before = len(os.listdir("/proc/self/fd"))
    base = heap_memory.map_slots_of_processes(1, 5, (4, 5, 6), share)
    assert base == PREFERRED_ADDRESS and sorted(driver.mapped) == slots(3)
    assert driver.allocations[driver.mapped[slots(3)[1]]] == (1, 1)
    assert driver.open_to == {at: [1] for at in slots(3)}
    assert shared == [[slots(3)[1]]], "its own slot is zeroed before it is shared, the others never"
    assert driver.zeroed == [slots(3)[1]]
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("function", ["cuMemAddressReserve", "cuMemCreate", "cuMemSetAccess"])
def test_what_the_driver_refuses(driver, function):
    driver.refusing = function
    with pytest.raises(OSError, match=f"{function} failed"):
        heap_memory.map_slots([0, 1])


def test_a_driver_call_that_fails_says_which(monkeypatch):
    class Library:
        def cuMemCreate(self, _):
            return 801

        def cuGetErrorName(self, status, text):
            text._obj.value = b"CUDA_ERROR_NOT_SUPPORTED"

    monkeypatch.setattr(cuda, "_driver", Library)
    with pytest.raises(OSError, match=r"cuMemCreate failed with CUDA error 801, CUDA_ERROR_NOT_S"):
        cuda.call("cuMemCreate", ctypes.c_int())
