"""A number of multiprocessors for CPU devices, which have none. Checked on 0.11.2 and 0.12.0.1."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

import jax


@contextlib.contextmanager
def cpu_core_count(count: int) -> Generator[None]:
    """Gives CPU devices a `core_count`, which GPU kernels size their grids by."""
    device_type = type(jax.local_devices(backend="cpu")[0])
    before = device_type.__dict__.get("core_count")
    fallback = getattr(device_type, "__getattr__", None)

    def core_count(device: Any) -> int:
        if device.platform == "cpu" or fallback is None:
            return count
        return fallback(device, "core_count")

    device_type.core_count = property(core_count)
    try:
        yield
    finally:
        if before is None:
            del device_type.core_count
        else:
            device_type.core_count = before
