"""The facts of a machine that its results record."""

from __future__ import annotations

import hashlib
import importlib.metadata
import pathlib
import platform
import shutil
import socket
import subprocess

import jax
import numpy as np
from jax.experimental import multihost_utils

from stretto.benchmarks.measurements.results import Machine
from stretto.distributed import xla_flags
from stretto.launch import environment

_PACKAGES = (
    "stretto",
    "jax",
    "jaxlib",
    "jax-cuda13-plugin",
    "jax-cuda12-plugin",
    "nvidia-nccl-cu13",
    "nvidia-nccl-cu12",
    "nvidia-cublas",
    "nvidia-cublas-cu12",
    "torch",
    "numpy",
)


def describe() -> Machine:
    """The present machine; starts JAX's backend. Every process must call it."""
    device = jax.devices()[0]
    on_gpu = is_gpu(device.platform)
    return Machine(
        card=device.device_kind if on_gpu else f"CPU ({platform.machine()})",
        platform="gpu" if on_gpu else device.platform,
        num_devices=jax.device_count(),
        num_processes=jax.process_count(),
        layout=layout(jax.process_count(), jax.device_count()),
        num_hosts=_num_hosts(),
        driver=_driver() if on_gpu else "",
        versions=versions(),
        commit=_commit(),
        xla_flags=xla_flags.given(environment.current()),
    )


def is_gpu(name: str) -> bool:
    """Whether JAX's platform `name` means NVIDIA GPUs."""
    return name in ("gpu", "cuda")


def layout(num_processes: int, num_devices: int) -> str:
    """In words, how devices are spread over processes."""
    if num_processes == 1:
        return "one process"
    if num_processes == num_devices:
        return "one process per device"
    return f"{num_processes} processes of {num_devices // num_processes} devices"


def _num_hosts() -> int:
    if jax.process_count() == 1:
        return 1
    digest = hashlib.sha256(socket.gethostname().encode()).digest()[:8]
    rows = multihost_utils.process_allgather(np.frombuffer(digest, dtype=np.uint8))
    return len({bytes(row) for row in np.asarray(rows).reshape(-1, 8)})


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that a time depends on."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _driver() -> str:
    return _first_line(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])


def _commit() -> str:
    """The checkout's commit, with "+" where tracked files differ from it; empty outside one."""
    folder = str(pathlib.Path(__file__).resolve().parent)
    commit = _first_line(["git", "-C", folder, "rev-parse", "--short=12", "HEAD"])
    changed = _first_line(["git", "-C", folder, "status", "--porcelain", "-uno"])
    return commit + ("+" if commit and changed else "")


def _first_line(command: list[str]) -> str:
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.splitlines()[0].strip() if done.returncode == 0 and done.stdout else ""
