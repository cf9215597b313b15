"""Writes a nonce into each GPU's memory from every other one, and reads it back on the owner.

Run as a program of its own (``python -m stretto.launch.doctor.peer_probe``), since a CUDA context
takes half a GiB of each GPU and stays for the life of a process; prints JSON. It calls the
driver directly and stores from a kernel, as Stretto's kernels do: drivers have claimed peer
access and copied right, while stores went into a private mirror.
"""

import ctypes
import json
import secrets
import sys
from typing import Any

_ALREADY_ENABLED = 704
_PTX = b"""
.version 7.0
.target sm_80
.address_size 64
.visible .entry write_nonce(.param .u64 where, .param .u32 nonce)
{
    .reg .b64 %rd<3>;
    .reg .b32 %r<2>;
    ld.param.u64 %rd1, [where];
    ld.param.u32 %r1, [nonce];
    cvta.to.global.u64 %rd2, %rd1;
    st.global.u32 [%rd2], %r1;
    membar.sys;
    ret;
}
"""


class CudaError(Exception):
    """A driver call that failed, with its name."""


class Driver:
    """The calls of ``libcuda`` that the probe needs, each checked."""

    def __init__(self, library: Any = None):
        self._library = ctypes.CDLL("libcuda.so.1") if library is None else library
        self.call("cuInit", 0)

    def call(self, name: str, *arguments: Any, allow: int = 0) -> int:
        """Call a function; raises ``CudaError`` unless it gives 0 or ``allow``."""
        status = getattr(self._library, name)(*arguments)
        if status not in (0, allow):
            raise CudaError(f"{name} failed with CUDA error {status}")
        return status

    def count(self) -> int:
        """Number of visible GPUs."""
        number = ctypes.c_int()
        self.call("cuDeviceGetCount", ctypes.byref(number))
        return number.value

    def open(self, ordinal: int) -> "Device":
        """A GPU with its context, four bytes of memory and the kernel."""
        device, context = ctypes.c_int(), ctypes.c_void_p()
        module, kernel, memory = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_uint64()
        self.call("cuDeviceGet", ctypes.byref(device), ordinal)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)
        self.call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(_PTX))
        self.call("cuModuleGetFunction", ctypes.byref(kernel), module, b"write_nonce")
        self.call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(4))
        return Device(device, context, kernel, memory)

    def can_access(self, one: "Device", other: "Device") -> bool:
        """Whether ``one`` can reach the memory of ``other``, by the driver's report."""
        answer = ctypes.c_int()
        self.call("cuDeviceCanAccessPeer", ctypes.byref(answer), one.device, other.device)
        return bool(answer.value)

    def write(self, writer: "Device", owner: "Device", nonce: int) -> None:
        """Store a number into the owner's memory by a kernel on the writer."""
        self.call("cuCtxSetCurrent", writer.context)
        self.call("cuCtxEnablePeerAccess", owner.context, 0, allow=_ALREADY_ENABLED)
        where, value = ctypes.c_uint64(owner.memory.value), ctypes.c_uint32(nonce)
        parameters = (ctypes.c_void_p * 2)(
            ctypes.cast(ctypes.byref(where), ctypes.c_void_p),
            ctypes.cast(ctypes.byref(value), ctypes.c_void_p),
        )
        one = (1, 1, 1)
        self.call("cuLaunchKernel", writer.kernel, *one, *one, 0, None, parameters, None)
        self.call("cuCtxSynchronize")

    def read(self, owner: "Device") -> int:
        """The number in the owner's memory, as the owner sees it."""
        value = ctypes.c_uint32()
        self.call("cuCtxSetCurrent", owner.context)
        self.call("cuMemcpyDtoH_v2", ctypes.byref(value), owner.memory, ctypes.c_size_t(4))
        return value.value


class Device:
    """Handles of one GPU."""

    def __init__(self, device: Any, context: Any, kernel: Any, memory: Any):
        self.device, self.context, self.kernel, self.memory = device, context, kernel, memory


def probe(driver: Any) -> dict[str, Any]:
    """``reached[i][j]``: whether GPU i's store arrived at j; None if the driver denies access."""
    devices = [driver.open(ordinal) for ordinal in range(driver.count())]
    reached: list[list[bool | None]] = []
    for writer in devices:
        row: list[bool | None] = []
        for owner in devices:
            if writer is owner:
                row.append(True)
            elif not driver.can_access(writer, owner):
                row.append(None)
            else:
                nonce = secrets.randbits(32)
                driver.write(writer, owner, nonce)
                row.append(driver.read(owner) == nonce)
        reached.append(row)
    return {"reached": reached}


def main() -> int:
    """Print the matrix, or the error, as JSON."""
    try:
        print(json.dumps(probe(Driver())))
    except (CudaError, OSError) as error:
        print(json.dumps({"error": str(error)}))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
