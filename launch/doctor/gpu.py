"""GPUs as the driver shows them: model, capability, memory, MIG, and NVLink between them."""

import csv
import io
import re
from dataclasses import dataclass

from stretto.launch.doctor.finding import Finding, error, ok, warning
from stretto.launch.doctor.tools import Output, ask

_TIMEOUT_S = 60
_FIELDS = "index,name,uuid,driver_version,compute_cap,memory.total,memory.used,mig.mode.current"
_KERNEL_CAPABILITY = (9, 0)
_UNTRIED_CAPABILITY = (10, 0)
_BUSY_SHARE = 0.1
_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class GpuState:
    """One GPU as ``nvidia-smi`` reports it; memory in MiB."""

    index: int
    name: str
    uuid: str
    driver: str
    capability: tuple[int, int]
    memory_total: int
    memory_used: int
    mig: bool


def query_gpus() -> tuple[list[GpuState], Output]:
    """All GPUs of this machine, and the raw answer."""
    answer = ask(
        ["nvidia-smi", f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits"], _TIMEOUT_S
    )
    return (parse_query(answer.stdout) if answer.status == 0 else []), answer


def parse_query(text: str) -> list[GpuState]:
    """GPUs from ``nvidia-smi --query-gpu`` with this module's fields."""
    found = []
    for row in csv.reader(io.StringIO(text), skipinitialspace=True):
        if len(row) != len(_FIELDS.split(",")):
            continue
        index, name, uuid, driver, capability, total, used, mig = (cell.strip() for cell in row)
        major, _, minor = capability.partition(".")
        found.append(
            GpuState(
                index=int(index),
                name=name,
                uuid=uuid,
                driver=driver,
                capability=(_whole(major), _whole(minor)),
                memory_total=_whole(total),
                memory_used=_whole(used),
                mig=mig == "Enabled",
            )
        )
    return found


def _whole(text: str) -> int:
    """The number, or 0 for ``[N/A]``."""
    return int(text) if text.isdecimal() else 0


def judge_driver(gpus: list[GpuState], answer: Output) -> list[Finding]:
    """The driver, and each GPU."""
    if answer.status is None and "No such file" in answer.stderr:
        return [ok("gpus", "no NVIDIA driver; jobs run on CPU devices")]
    if not gpus:
        return [
            error(
                "driver",
                f"nvidia-smi finds no GPU: {answer.last_words()}",
                "check the driver (nvidia-smi), or set JAX_PLATFORMS=cpu",
            )
        ]
    return [ok("driver", gpus[0].driver), *(judge_gpu(gpu) for gpu in gpus)]


def judge_gpu(gpu: GpuState) -> Finding:
    """One GPU: can it run the fused kernels, and is it free?"""
    topic = f"gpu {gpu.index}"
    major, minor = gpu.capability
    text = f"{gpu.name}, compute capability {major}.{minor}, {gpu.memory_total / 1024:.0f} GiB"
    if gpu.mig:
        return warning(
            topic,
            f"{text}, cut into MIG slices: they reach no peer",
            "nvidia-smi -mig 0 (as the machine's owner), or run on one slice",
        )
    if gpu.capability == _UNTRIED_CAPABILITY:
        return warning(
            topic,
            f"{text}: the fused kernels are compiled for it (Blackwell), and were never run on one",
            'backend="auto" takes XLA\'s collectives here; `stretto tune` measures the kernels',
        )
    if gpu.capability != _KERNEL_CAPABILITY:
        return warning(
            topic,
            f"{text}: the fused kernels need 9.0 (Hopper)",
            'nothing to do: backend="auto" takes XLA\'s collectives here',
        )
    if gpu.memory_used > _BUSY_SHARE * gpu.memory_total:
        return warning(
            topic,
            f"{text}, {gpu.memory_used / 1024:.1f} GiB of it in use",
            "end the other job (nvidia-smi shows its process), or choose other GPUs by "
            "CUDA_VISIBLE_DEVICES",
        )
    return ok(topic, text)


def query_links() -> dict[tuple[int, int], str]:
    """How each pair of GPUs is connected: ``NV18``, ``PIX``, ``SYS``..."""
    answer = ask(["nvidia-smi", "topo", "-m"], _TIMEOUT_S)
    return parse_links(answer.stdout) if answer.status == 0 else {}


def parse_links(text: str) -> dict[tuple[int, int], str]:
    """Connections from the matrix of ``nvidia-smi topo -m``."""
    links: dict[tuple[int, int], str] = {}
    columns: list[int] = []
    for line in _ESCAPE.sub("", text).splitlines():
        cells = line.split()
        if not cells or not cells[0].startswith("GPU"):
            continue
        if not columns:
            columns = [int(c[3:]) for c in cells if re.fullmatch(r"GPU\d+", c)]
            continue
        if re.fullmatch(r"GPU\d+", cells[0]):
            row = int(cells[0][3:])
            for column, link in zip(columns, cells[1:], strict=False):
                if row != column:
                    links[row, column] = link
    return links


def judge_links(links: dict[tuple[int, int], str]) -> list[Finding]:
    """NVLink between all pairs; without it kernels over that pair are slow or refused."""
    if not links:
        return []
    slow = sorted((a, b) for (a, b), link in links.items() if a < b and not link.startswith("NV"))
    if not slow:
        kinds = sorted(set(links.values()))
        return [ok("nvlink", f"between all GPUs ({', '.join(kinds)})")]
    pairs = ", ".join(f"{a}-{b} ({links[a, b]})" for a, b in slow)
    return [
        warning(
            "nvlink",
            f"not between GPUs {pairs}",
            "keep teams within NVLink: choose GPUs by CUDA_VISIBLE_DEVICES",
        )
    ]
