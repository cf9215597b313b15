"""The cores beside a process's GPUs, to which its agent keeps it.

A process whose GPUs hang on one socket and that runs on the other sends everything it copies to
them, and all that NCCL's threads do, across the link between the sockets. Memory follows by itself:
Linux takes it from the socket of the core that first touches it.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from stretto.launch.planning.gpus import NVIDIA_SMI_TIMEOUT_S, Gpu

_QUERY = ("--query-gpu=index,pci.bus_id", "--format=csv,noheader")
_ROW = re.compile(r"^\s*(\d+),\s*([0-9A-Fa-f]+):([0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.\d)\s*$")


def cores_beside(gpus: Sequence[Gpu], sys_folder: Path = Path("/sys")) -> set[int] | None:
    """Cores on the NUMA nodes of these GPUs; None where the machine does not say, or has but one.

    Args:
      gpus: of this machine.
      sys_folder: where the kernel shows its devices.
    """
    if len(list((sys_folder / "devices" / "system" / "node").glob("node[0-9]*"))) < 2:
        return None  # all cores are beside all GPUs
    addresses = _pci_addresses()
    found: set[int] = set()
    for gpu in gpus:
        device = sys_folder / "bus" / "pci" / "devices" / addresses.get(gpu.index, "none")
        try:
            node = int((device / "numa_node").read_text())
            cores = (device / "local_cpulist").read_text()
        except (OSError, ValueError):
            return None
        if node < 0:
            return None
        found |= parse_cores(cores)
    return found or None


def parse_cores(text: str) -> set[int]:
    """The numbers of ``0-3,8``, as the kernel writes them."""
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return cores


def keep_to(cores: set[int]) -> bool:
    """Keep this process, and what it starts, to those of the cores that it may use; if any."""
    allowed = cores & os.sched_getaffinity(0)
    if allowed:
        os.sched_setaffinity(0, allowed)
    return bool(allowed)


def _pci_addresses() -> dict[int, str]:
    """PCI addresses of this machine's GPUs, as the kernel writes them, by nvidia-smi's numbers."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return {}
    try:
        answer = subprocess.run(
            [tool, *_QUERY], capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return {}
    rows = filter(None, map(_ROW.match, answer.stdout.splitlines()))
    return {int(row[1]): f"{row[2][-4:]}:{row[3]}".lower() for row in rows}
