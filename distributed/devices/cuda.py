"""The few calls of CUDA's driver that have no name in JAX."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def call(function: str, *arguments: object) -> None:
    """Calls `function` of the driver.

    Raises:
      OSError: it failed, or there is no driver.
    """
    status = getattr(_driver(), function)(*arguments)
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorName(status, ctypes.byref(text))
        name = (text.value or b"?").decode()
        raise OSError(f"{function} failed with CUDA error {status}, {name}.")


@contextlib.contextmanager
def context_of(ordinal: int) -> Iterator[None]:
    """The context that JAX uses on GPU `ordinal` of this process is current inside."""
    device, context = ctypes.c_int(), ctypes.c_void_p()
    call("cuInit", 0)
    call("cuDeviceGet", ctypes.byref(device), ordinal)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call("cuCtxPushCurrent_v2", context)
    try:
        yield
    finally:
        call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
