"""Which GPUs of a machine a job may use, found without starting CUDA.

An unknown number is an error, never "no GPU": a job that should be on GPUs and finds itself on
the CPU costs more than one that does not start.
"""

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stretto.launch.environment import CUDA_VISIBLE_DEVICES, names_cuda
from stretto.launch.errors import LaunchError

NVIDIA_SMI_TIMEOUT_S = 30
_GPU_LINE = re.compile(r"^GPU (\d+): (.+?) \(UUID: (GPU-[^)]+)\)")
_MIG_LINE = re.compile(r"^\s+MIG (\S+)\s.*\(UUID: (MIG-[^)]+)\)")
_LOST_LINE = re.compile(r"^Unable to determine the device handle", re.MULTILINE)
_UNKNOWN_UUID = "GPU-unknown-"
_WAY_OUT = "or run on the CPU with --platform cpu (JAX_PLATFORMS=cpu)"
# Values of CUDA_VISIBLE_DEVICES for no GPU, by users and by Slurm.
_NO_DEVICE = ("", "-1", "NoDevFiles")


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


@dataclass(frozen=True)
class Listing:
    """The output of ``nvidia-smi -L`` on a host; ``lost``: its message on a GPU that is lost."""

    gpus: tuple[Gpu, ...]
    lost: str = ""


def judge_listing(status: int, text: str, where: str) -> Listing:
    """The GPUs that ``nvidia-smi -L`` found.

    Args:
      status: its exit status.
      text: all that it wrote.
      where: ``"this machine"`` or ``"host b"``, for errors.

    Raises:
      LaunchError: it failed: the driver is not loaded, of another version, or has no device.
    """
    if status != 0:
        words = " ".join(text.split()) or "no words"
        raise LaunchError(
            f"nvidia-smi on {where} failed with status {status} ({words[:200]}), so its GPUs "
            f"are unknown; repair the driver, {_WAY_OUT}"
        )
    lost = next((line for line in text.splitlines() if _LOST_LINE.match(line)), "")
    return Listing(parse_listing(text), lost)


def list_gpus() -> Listing:
    """All GPUs of this machine; none where there is no NVIDIA driver.

    Raises:
      LaunchError: ``nvidia-smi`` is there and failed, or gave no answer within 30 s.
    """
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return Listing(device_files(Path("/dev")))
    command = [tool, "-L"]
    try:
        result = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=NVIDIA_SMI_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        raise LaunchError(
            f"nvidia-smi on this machine gave no answer within {NVIDIA_SMI_TIMEOUT_S:g} s, so "
            f"its GPUs are unknown; repair the driver, {_WAY_OUT}"
        ) from None
    except OSError as error:
        raise LaunchError(f"{tool} cannot be run ({error.strerror}); mend it, {_WAY_OUT}") from None
    return judge_listing(result.returncode, result.stdout + result.stderr, "this machine")


def device_files(folder: Path) -> tuple[Gpu, ...]:
    """GPUs by their device files, for containers without ``nvidia-smi``."""
    numbers = (path.name.removeprefix("nvidia") for path in folder.glob("nvidia[0-9]*"))
    return unlisted(sorted(int(number) for number in numbers if number.isdecimal()))


def unlisted(indices: Sequence[int]) -> tuple[Gpu, ...]:
    """GPUs of which nothing but their numbers is known."""
    return tuple(Gpu(i, "NVIDIA GPU", f"{_UNKNOWN_UUID}{i}") for i in indices)


def visible(
    listing: Listing, cuda_visible_devices: str | None, where: str = "this machine"
) -> tuple[Gpu, ...]:
    """The GPUs that CUDA enumerates, in its order, under ``CUDA_VISIBLE_DEVICES``.

    Entries are indices or the start of a UUID; an empty value, ``-1`` and Slurm's ``NoDevFiles``
    end the list.

    Raises:
      LaunchError: an entry names no GPU of the machine, or names one again, either of which CUDA
        takes for the end of the list or for none at all; or a GPU does not answer and no entry
        says which others to take.
    """
    gpus = listing.gpus
    if cuda_visible_devices is None:
        if listing.lost:
            raise LaunchError(
                f"a GPU of {where} does not answer ({listing.lost}); reset it, or name the others "
                f"by {CUDA_VISIBLE_DEVICES}"
            )
        return gpus
    chosen: list[Gpu] = []
    for entry in entries(cuda_visible_devices):
        gpu = _named(entry, gpus, len(chosen))
        if gpu is None or gpu in chosen:
            why = f"names {entry!r} again" if gpu else f"names {entry!r}, which is no GPU"
            there = ", ".join(str(gpu.index) for gpu in gpus) or "none"
            raise LaunchError(
                f"{CUDA_VISIBLE_DEVICES}={cuda_visible_devices} {why} of {where} ({there}); "
                f"correct or unset it, {_WAY_OUT}"
            )
        chosen.append(gpu)
    return tuple(chosen)


def entries(cuda_visible_devices: str) -> list[str]:
    """The entries of ``CUDA_VISIBLE_DEVICES`` up to one that means "no more"."""
    found = []
    for entry in (e.strip() for e in cuda_visible_devices.split(",")):
        if entry in _NO_DEVICE:
            break
        found.append(entry)
    return found


def _named(entry: str, gpus: Sequence[Gpu], position: int) -> Gpu | None:
    """The GPU that an entry names; the first one, as in CUDA, where a short UUID fits several."""
    if entry.isdecimal():
        return next((gpu for gpu in gpus if gpu.index == int(entry)), None)
    if not entry.startswith(("GPU-", "MIG-")):
        return None
    if gpus and all(gpu.uuid.startswith(_UNKNOWN_UUID) for gpu in gpus):
        return Gpu(position, "NVIDIA GPU", entry)  # only CUDA could tell which one
    return next((gpu for gpu in gpus if gpu.uuid.startswith(entry)), None)


def usable_gpus(environ: Mapping[str, str], where: str = "this machine") -> tuple[Gpu, ...]:
    """The GPUs that a JAX process with this environment would see.

    Raises:
      LaunchError: it cannot be told, or ``CUDA_VISIBLE_DEVICES`` names what is not there.
    """
    platforms = environ.get("JAX_PLATFORMS", "").lower()
    if platforms and not names_cuda(platforms):
        return ()
    limit = environ.get(CUDA_VISIBLE_DEVICES)
    if limit is not None and not entries(limit):
        return ()
    return visible(list_gpus(), limit, where)
