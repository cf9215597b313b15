"""What the GPU tests run on, and whether it still answers."""

from __future__ import annotations

import collections
import platform
import subprocess
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import jax
import numpy as np

from stretto.launch import environment
from stretto.launch.doctor.gpu import query_gpus
from stretto.launch.doctor.nccl import find_nccl

ROOT = Path(__file__).parents[2]


def devices_answer() -> bool:
    """Whether every device of this process still computes."""
    try:
        for device in jax.local_devices():
            jax.block_until_ready(jax.device_put(np.zeros(1, np.float32), device) + 1)
    except jax.errors.JaxRuntimeError:
        return False
    return True


def describe(*, rehearsed: bool, nccl: str | None) -> Iterator[tuple[str, str]]:
    """(heading, text) of the cards and the versions; starts no GPU."""
    gpus, _ = query_gpus()
    if rehearsed or not gpus:
        yield "machine", "a rehearsal on CPU devices: nothing was tested but the tests"
    else:
        names = collections.Counter(gpu.name for gpu in gpus)
        cards = ", ".join(f"{count} x {name}" for name, count in names.items())
        yield "machine", f"{cards}, driver {gpus[0].driver}"
    version, _ = find_nccl(environment.current())
    versions = f"Python {platform.python_version()}, JAX {metadata.version('jax')}"
    versions += f", NCCL {'.'.join(map(str, version)) if version else 'not found'}"
    if nccl:
        version, _ = find_nccl({"LD_PRELOAD": nccl})
        versions += f" ({'.'.join(map(str, version or '?'))} for a process per GPU)"
    yield "software", versions + _commit()


def _commit() -> str:
    """The commit of the checkout, where it is one."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return f", Stretto {done.stdout.strip()}"
