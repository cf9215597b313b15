"""Who started this process: ``stretto run``, Open MPI, MPICH, Slurm, torchrun or nobody.

Only the launcher's own variables count, in an order that puts the innermost launcher first:
``torchrun`` inside ``srun`` leaves ``SLURM_PROCID`` at 0 in all its processes, and ``mpirun``
inside an allocation leaves Slurm's variables of the enclosing step. A script of ``stretto run``
that starts ``mpirun`` leaves Stretto's, so these carry fingerprints of the launchers around them.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from stretto.launch import environment
from stretto.launch.errors import LaunchError

Launcher = Literal["stretto", "torchrun", "openmpi", "mpich", "slurm"]


@dataclass(frozen=True)
class Launched:
    """A process's place among those that its launcher started together."""

    launcher: Launcher
    process_id: int
    num_processes: int
    local_process_id: int
    num_local_processes: int


# For each launcher the names of: process id, count, local id, local count. The local ones may
# be missing from the environment; ids then stand for one process per host.
_NAMES: dict[Launcher, tuple[str, str, str, str]] = {
    "stretto": (
        environment.PROCESS_ID,
        environment.NUM_PROCESSES,
        environment.LOCAL_PROCESS_ID,
        environment.NUM_LOCAL_PROCESSES,
    ),
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "openmpi": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "mpich": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "slurm": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
}


_LAUNCHERS: tuple[Launcher, ...] = get_args(Launcher)  # in the order of `_NAMES`
# What differs between two jobs of a launcher, or two processes of one.
_IDENTITY: dict[Launcher, tuple[str, ...]] = {
    "torchrun": ("TORCHELASTIC_RUN_ID",),
    "openmpi": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMIX_NAMESPACE", "PMIX_RANK"),
    "mpich": ("PMI_RANK", "PMI_SIZE", "PMI_FD", "PMI_PORT"),
    "slurm": ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID"),
}


def fingerprint(environ: Mapping[str, str]) -> str:
    """What a process of ``stretto run`` knows of the launchers around it.

    A process that this one starts by another launcher finds another fingerprint of that.
    """
    return ",".join(_digest(launcher, environ) for launcher in _IDENTITY)


def _digest(launcher: Launcher, environ: Mapping[str, str]) -> str:
    words = [f"{name}={environ.get(name)}" for name in _IDENTITY[launcher]]
    return hashlib.sha256("\n".join(words).encode()).hexdigest()[:12]


def detect(environ: Mapping[str, str]) -> Launched | None:
    """The innermost launcher and this process's place in it, or None outside of any.

    A Slurm batch script itself (not run by ``srun``) counts as outside, though it has
    ``SLURM_PROCID``.

    Raises:
      LaunchError: the launcher's variables contradict each other.
    """
    around = environ.get(environment.OUTER, "").split(",")
    ours: Launched | None = None
    for launcher in _LAUNCHERS:
        if not _has_place(launcher, environ):
            continue
        if launcher == "stretto" and environment.OUTER in environ:
            ours = _place_of(launcher, environ)
        elif ours is None or _digest(launcher, environ) not in around:
            return _place_of(launcher, environ)
    return ours


def _has_place(launcher: Launcher, environ: Mapping[str, str]) -> bool:
    rank, size, *_ = _NAMES[launcher]
    if launcher == "torchrun" and "TORCHELASTIC_RUN_ID" not in environ:
        return False
    return rank in environ and size in environ


def _place_of(launcher: Launcher, environ: Mapping[str, str]) -> Launched:
    rank, size, local_rank, local_size = _NAMES[launcher]
    process_id = _integer(environ, rank)
    num_processes = _integer(environ, size)
    if not 0 <= process_id < num_processes:
        raise LaunchError(
            f"{rank}={process_id} must be less than {size}={num_processes}; "
            "were these variables left over from another job?"
        )
    local_id = _integer(environ, local_rank, default=0)
    if launcher == "slurm":
        num_local = _slurm_local_count(environ, default=1)
    else:
        num_local = _integer(environ, local_size, default=max(1, local_id + 1))
    return Launched(launcher, process_id, num_processes, local_id, num_local)


def inside_launcher(environ: Mapping[str, str]) -> Launched | None:
    """Like ``detect``, but only if other processes were started beside this one."""
    launched = detect(environ)
    return launched if launched is not None and launched.num_processes > 1 else None


def _integer(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None:
        if default is None:
            raise LaunchError(f"{name} is not set; start the job with stretto run or mpirun")
        return default
    try:
        return int(text)
    except ValueError:
        raise LaunchError(f"{name}={text!r} must be an integer") from None


def _slurm_local_count(environ: Mapping[str, str], default: int) -> int:
    """Tasks on this node, from Slurm's ``4(x2),3`` and this node's place in it."""
    text = environ.get("SLURM_STEP_TASKS_PER_NODE")
    if not text:
        return default
    counts: list[int] = []
    for part in text.split(","):
        count, _, repeat = part.partition("(x")
        counts += [int(count)] * (int(repeat.rstrip(")")) if repeat else 1)
    node = _integer(environ, "SLURM_NODEID", default=0)
    return counts[node] if node < len(counts) else default
