"""The machine that a call runs on, as far as a kernel's choices depend on it."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import jax

from stretto.distributed import compiling, simulating

HOPPER, BLACKWELL = "sm_90", "sm_100"
# For devices that are not present: parts of the names that the driver gives.
ARCHITECTURES = {
    HOPPER: ("H100", "H200", "H800", "H20", "GH200"),
    BLACKWELL: ("B100", "B200", "GB200"),
}
RATED, OTHER_FORMS = {"H100", "H200"}, {"PCIE", "NVL"}
"""Words in the names of the GPUs that the rates of estimates were measured on, H100s and H200s with
NVSwitch between them; and of others of these names. An H20 has a sixth of an H200's tensor cores,
an H800 half of its links."""
SHARED_BYTES = {HOPPER: 232_448, BLACKWELL: 232_448}
"""Shared memory that one block may have, in bytes (CUDA C++ Programming Guide, Compute
Capabilities)."""
MULTIPROCESSORS = 132
"""Of an H100 SXM, where nothing else is known."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """One device of the enclosing mesh.

    A device that is no GPU is described as the GPU that the simulator simulates, except for its
    `platform` and `kind`.

    Attributes:
      platform: "gpu", "cpu" or "tpu".
      kind: the device's name, as JAX has it.
      architecture: "sm_90", "sm_100", or "" for a GPU of another one.
      multiprocessors: of the device.
      shared_bytes: shared memory of a block, in bytes.
    """

    platform: str
    kind: str
    architecture: str = HOPPER
    multiprocessors: int = MULTIPROCESSORS
    shared_bytes: int = SHARED_BYTES[HOPPER]

    @property
    def is_rated(self) -> bool:
        """Whether estimates hold for it: it is such a GPU as their rates were measured on."""
        return self.platform != "gpu" or is_rated(self.kind)

    @classmethod
    def of_kind(cls, platform: str, kind: str, multiprocessors: int = 0) -> Machine:
        """The machine whose devices have this platform and name."""
        platform = "gpu" if platform in ("cuda", "gpu") else platform
        if platform != "gpu":
            target = simulating.target()
            return cls(
                platform=platform,
                kind=kind,
                architecture=target.architecture,
                multiprocessors=target.multiprocessors,
                shared_bytes=SHARED_BYTES[target.architecture],
            )
        architecture = _architecture_of(kind)
        return cls(
            platform=platform,
            kind=kind,
            architecture=architecture,
            multiprocessors=multiprocessors or MULTIPROCESSORS,
            shared_bytes=SHARED_BYTES.get(architecture, SHARED_BYTES[HOPPER]),
        )

    @classmethod
    def of_mesh(cls) -> Machine:
        """The machine that is compiled for: of the enclosing mesh's devices, or of the default
        backend's.
        """
        if (gpus := compiling.current()) is not None:
            return cls.of_kind("gpu", gpus.kind, gpus.multiprocessors)
        device: Any = jax.sharding.get_abstract_mesh().abstract_device
        if device is not None and device.platform:
            return cls.of_kind(device.platform, device.device_kind, device.num_cores or 0)
        local = jax.devices()[0]
        cores = getattr(local, "core_count", None) or 0
        return cls.of_kind(local.platform, local.device_kind, cores)


@functools.cache
def _architecture_of(kind: str) -> str:
    """ "sm_90" of "NVIDIA H200": as a device of this kind says, or by its name; "" if unknown."""
    for device in jax.devices():
        capability = getattr(device, "compute_capability", None)
        if device.device_kind == kind and capability:
            return "sm_" + capability.replace(".", "")
    return architecture_by_name(kind)


def architecture_by_name(kind: str) -> str:
    """That of a GPU which has one of the names of `ARCHITECTURES` as a word of its own, or ""."""
    return next((found for found, names in ARCHITECTURES.items() if _words(kind) & {*names}), "")


def is_rated(kind: str) -> bool:
    """Whether the rates of estimates were measured on GPUs of this name."""
    return bool(_words(kind) & RATED) and not _words(kind) & OTHER_FORMS


def _words(kind: str) -> set[str]:
    return set(re.split(r"[\s-]+", kind.upper()))
