"""Which GPUs of this machine a job may use, found without starting CUDA."""

import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_NVIDIA_SMI_TIMEOUT_S = 30
_GPU_LINE = re.compile(r"^GPU (\d+): (.+?) \(UUID: (GPU-[^)]+)\)")
_MIG_LINE = re.compile(r"^\s+MIG (\S+)\s.*\(UUID: (MIG-[^)]+)\)")


@dataclass(frozen=True)
class Gpu:
    """One GPU, or one MIG slice of a GPU, as ``nvidia-smi -L`` names it."""

    index: int
    name: str
    uuid: str
    is_mig: bool = False


def parse_listing(text: str) -> tuple[Gpu, ...]:
    """The GPUs in the output of ``nvidia-smi -L``; a GPU cut into MIG slices gives its slices."""
    found: list[Gpu] = []
    for line in text.splitlines():
        if match := _GPU_LINE.match(line):
            found.append(Gpu(int(match[1]), match[2], match[3]))
        elif match := _MIG_LINE.match(line):
            parent = found[-1]
            if not parent.is_mig:
                found.pop()
            found.append(Gpu(parent.index, f"{parent.name} MIG {match[1]}", match[2], True))
    return tuple(found)


def list_gpus() -> tuple[Gpu, ...]:
    """All GPUs of this machine; empty where there is no NVIDIA driver."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return _device_files()
    try:
        result = subprocess.run(
            [tool, "-L"], capture_output=True, text=True, timeout=_NVIDIA_SMI_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return parse_listing(result.stdout) if result.returncode == 0 else ()


def _device_files() -> tuple[Gpu, ...]:
    """GPUs by their device files, for containers without ``nvidia-smi``."""
    indices = sorted(
        int(path.name.removeprefix("nvidia"))
        for path in Path("/dev").glob("nvidia[0-9]*")
        if path.name.removeprefix("nvidia").isdigit()
    )
    return tuple(Gpu(i, "NVIDIA GPU", f"GPU-unknown-{i}") for i in indices)


def visible(gpus: tuple[Gpu, ...], cuda_visible_devices: str | None) -> tuple[Gpu, ...]:
    """The GPUs that CUDA enumerates, in its order, under ``CUDA_VISIBLE_DEVICES``.

    Entries are indices or the start of a UUID; as CUDA does, the list ends at the first entry
    that names nothing, and a repeated entry makes the whole list void.
    """
    if cuda_visible_devices is None:
        return gpus
    chosen: list[Gpu] = []
    for entry in (e.strip() for e in cuda_visible_devices.split(",")):
        if entry.isdigit():
            fitting = [gpu for gpu in gpus if gpu.index == int(entry)]
        elif entry.startswith(("GPU-", "MIG-")):
            fitting = [gpu for gpu in gpus if gpu.uuid.startswith(entry)]
        else:
            fitting = []
        if not fitting:
            break
        if fitting[0] in chosen:
            return ()
        chosen.append(fitting[0])
    return tuple(chosen)


def usable_gpus(environ: Mapping[str, str]) -> tuple[Gpu, ...]:
    """The GPUs that a JAX process with this environment would see."""
    platforms = environ.get("JAX_PLATFORMS", "").lower()
    if platforms and not any(p.strip() in ("cuda", "gpu") for p in platforms.split(",")):
        return ()
    limit = environ.get("CUDA_VISIBLE_DEVICES")
    if limit is not None and not visible_entries(limit):
        return ()
    return visible(list_gpus(), limit)


def visible_entries(cuda_visible_devices: str) -> list[str]:
    """The entries of ``CUDA_VISIBLE_DEVICES`` up to the first that can name no device."""
    entries = []
    for entry in (e.strip() for e in cuda_visible_devices.split(",")):
        if not (entry.isdigit() or entry.startswith(("GPU-", "MIG-"))):
            break
        entries.append(entry)
    return entries
