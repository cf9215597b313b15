"""NCCL: which version a process would load, and what that version can do."""

import ctypes
import ctypes.util
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from stretto.launch import environment
from stretto.launch.doctor.finding import Finding, ok, warning

_NAME = "libnccl.so.2"
# The first version with ncclGetPeerDevicePointer, by which one process reaches another's GPU.
PROCESS_PER_GPU_FROM = (2, 29)
# The first version that lets several processes join on one GPU, where `SHARING` asks for it.
SHARED_GPU_FROM = (2, 30)
SHARING = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}


def check_nccl(num_gpus: int) -> list[Finding]:
    """Whether one process per GPU can work; nothing to say on fewer than two GPUs."""
    if num_gpus < 2:
        return []
    return [judge_nccl(*find_nccl(environment.current()))]


def candidates(environ: Mapping[str, str]) -> list[str]:
    """Files a process may load NCCL from, in the loader's order.

    ``LD_PRELOAD`` comes first, and ``LD_LIBRARY_PATH`` before the wheel that JAX points to.
    """
    preloaded = [
        path
        for path in environ.get("LD_PRELOAD", "").replace(":", " ").split()
        if Path(path).name.startswith("libnccl")
    ]
    folders = [Path(f) for f in environ.get("LD_LIBRARY_PATH", "").split(":") if f]
    try:
        spec = find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        spec = None
    if spec is not None:
        folders += [Path(f) / "lib" for f in spec.submodule_search_locations or ()]
    found = preloaded + [str(f / _NAME) for f in folders if (f / _NAME).is_file()]
    system = ctypes.util.find_library("nccl")
    return [*found, system] if system else found


def find_nccl(environ: Mapping[str, str]) -> tuple[tuple[int, ...] | None, str]:
    """``(version, path)`` of the NCCL that a JAX process would use; None if there is none."""
    for path in candidates(environ):
        try:
            library = ctypes.CDLL(path)
            code = ctypes.c_int()
            if library.ncclGetVersion(ctypes.byref(code)) == 0:
                return decode(code.value), path
        except (OSError, AttributeError):
            continue
    return None, ""


def decode(code: int) -> tuple[int, ...]:
    """``(2, 29, 3)`` for 22903; before 2.9 a version took four digits."""
    if code < 10_000:
        return code // 1000, code % 1000 // 100, code % 100
    return code // 10_000, code % 10_000 // 100, code % 100


def judge_nccl(version: tuple[int, ...] | None, path: str) -> Finding:
    """An old NCCL leaves one process per node, the default, untouched."""
    way_out = (
        "pip install 'nvidia-nccl-cu13>=2.29' (or -cu12), load one with"
        " --env LD_PRELOAD=/path/to/libnccl.so.2, or keep --processes-per node"
    )
    if version is None:
        return warning("nccl", "no libnccl.so.2 found; only one process per node works", way_out)
    text = f"{'.'.join(map(str, version))} ({path})"
    if version < PROCESS_PER_GPU_FROM:
        return warning("nccl", f"{text} is too old for one process per GPU", way_out)
    return ok("nccl", text)


def why_no_process_per_gpu(environ: Mapping[str, str]) -> str | None:
    """Why ``--processes-per gpu`` cannot work with this environment's NCCL, or None."""
    finding = judge_nccl(*find_nccl(environ))
    return None if finding.level == "ok" else f"NCCL {finding.text}; {finding.way_out}"


def why_no_shared_gpu(environ: Mapping[str, str]) -> str | None:
    """Why ``--devices-per-gpu`` cannot work with this environment's NCCL, or None."""
    version, path = find_nccl(environ)
    if version is not None and version >= SHARED_GPU_FROM:
        return None
    found = "no libnccl.so.2" if version is None else f"{'.'.join(map(str, version))} ({path})"
    least = ".".join(map(str, SHARED_GPU_FROM))
    return (
        f"it needs NCCL {least}, and there is {found}; pip install 'nvidia-nccl-cu13>={least}' (or "
        "-cu12), or load one with --env LD_PRELOAD=/path/to/libnccl.so.2"
    )
