"""Every environment variable that launching reads or writes.

Three groups reach a script started by ``stretto run``:

- what its own host gives it (``HOST``): PATH, HOME, the locale, the MPI library's own;
- what the machine of ``stretto run`` passes on (``FORWARDED``, and ``--env``);
- what the launcher sets itself (the ``STRETTO_*`` names below).

Anything else stays behind, so that a job does not depend on what happened to be exported in
one terminal.
"""

import os
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from stretto.launch.errors import LaunchError

# Set for every process; `stretto.launch.initialize` reads them.
PROCESS_ID = "STRETTO_PROCESS_ID"
NUM_PROCESSES = "STRETTO_NUM_PROCESSES"
LOCAL_PROCESS_ID = "STRETTO_LOCAL_PROCESS_ID"
NUM_LOCAL_PROCESSES = "STRETTO_NUM_LOCAL_PROCESSES"
COORDINATOR = "STRETTO_COORDINATOR"  # "address:port" of process 0
LOCAL_DEVICE_IDS = "STRETTO_LOCAL_DEVICE_IDS"  # "0,1"; empty means all
CPU_DEVICES = "JAX_NUM_CPU_DEVICES"
PLATFORM = "STRETTO_PLATFORM"  # "cuda" or "cpu": what the job was planned on
CUDA_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
RESTART = "STRETTO_RESTART"  # 0 at first, then 1, 2, ... under --restarts

# Between the supervisor and its agents only; scripts never see them.
RENDEZVOUS = "STRETTO_RENDEZVOUS"  # of a `Rendezvous`
AGENT_INDEX = "STRETTO_AGENT_INDEX"  # set where no MPI launcher numbers the agents
AGENT_FIRST = "STRETTO_AGENT_FIRST"  # added to the launcher's numbers, where it has several steps
WORKER_PIPES = "STRETTO_WORKER_PIPES"
PROGRESS = "STRETTO_PROGRESS"  # of a `Target`: where `progress` writes
RECORD = "STRETTO_RECORD"  # of a `Target`: where the agent hears of programs
OUTER = "STRETTO_OUTER"  # fingerprints of the launchers around a process (detection.py)
PRIVATE = (RENDEZVOUS, AGENT_INDEX, AGENT_FIRST, WORKER_PIPES, PROGRESS, RECORD, OUTER)
# Set to 0, programs are not compared between processes.
CHECK_PROGRAMS = "STRETTO_CHECK_PROGRAMS"
# What an enclosing job told one of its processes is not for those of a job that this one starts.
OF_ONE_PROCESS = (
    *(PROCESS_ID, NUM_PROCESSES, LOCAL_PROCESS_ID, NUM_LOCAL_PROCESSES),
    *(COORDINATOR, LOCAL_DEVICE_IDS, RESTART, PLATFORM),
)
SET_BY_LAUNCHER = (*PRIVATE, *OF_ONE_PROCESS)
"""What nobody else can set for a job's processes."""

FORWARDED = (
    "STRETTO_*",
    "JAX_*",
    "XLA_*",
    "MOSAIC_GPU_*",
    "CUDA_*",
    "NCCL_*",
    "NVIDIA_*",
    "TF_CPP_*",
    "GLOO_*",
    "UCX_*",
    "FI_*",
    "OMP_*",
    "LD_LIBRARY_PATH",
    "PYTHON*",
    "VIRTUAL_ENV",
    "TZ",
)
HOST = (
    "PATH",
    CUDA_VISIBLE_DEVICES,
    "HOME",
    "USER",
    "LOGNAME",
    "SHELL",
    "HOSTNAME",
    "TMPDIR",
    "LANG",
    "LC_*",
    "XDG_*",
    "SSL_CERT_*",
    "OMPI_*",
    "OPAL_*",
    "PMIX_*",
    "PRTE_*",
    "PMI_*",
    "MPI*",
    "HYDRA_*",
    "SLURM_*",
)


@dataclass(frozen=True)
class Rendezvous:
    """Where agents find the supervisor, and the token by which it knows them.

    As text it has no spaces, commas or quotes, over which MPI launchers stumble.
    """

    token: str
    addresses: tuple[str, ...]
    port: int

    def __str__(self) -> str:
        return "/".join((self.token, str(self.port), *self.addresses))

    @classmethod
    def parse(cls, text: str) -> "Rendezvous":
        """The inverse of ``str``."""
        token, port, *addresses = text.split("/")
        return cls(token, tuple(addresses), int(port))


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a variable's name fits one of the shell patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def current() -> dict[str, str]:
    """This process's environment, as a copy."""
    return dict(os.environ)


def own() -> MutableMapping[str, str]:
    """This process's environment itself, for what changes it before JAX reads it."""
    return os.environ


def leave_gpu_memory() -> None:
    """Has JAX, which is not used yet, take GPU memory as it needs it, not most of it at once."""
    os.environ.update(GPU_MEMORY_AS_NEEDED)


@dataclass(frozen=True)
class Target:
    """A descriptor by which a process reports to its agent, and its identity when it was opened.

    A child that the process forked has the descriptor, and must not write. A script may close all
    descriptors that it does not know; then the number may be that of a file of its own.
    """

    fd: int
    pid: int
    device: int
    inode: int

    @property
    def is_open(self) -> bool:
        """Whether this process may write on it."""
        if self.pid != os.getpid():
            return False
        try:
            file = os.fstat(self.fd)
        except OSError:
            return False
        return (file.st_dev, file.st_ino) == (self.device, self.inode)


def target(name: str) -> Target:
    """That of ``PROGRESS`` or ``RECORD``; one that is not open if there is none."""
    words = os.environ.get(name, "").split(",")
    return Target(*map(int, words)) if len(words) == 4 else Target(-1, -1, 0, 0)


def parse_env_option(option: str, environ: Mapping[str, str]) -> tuple[str, str]:
    """``NAME=VALUE``, or ``NAME`` for the value it has here. An empty value is kept.

    Raises:
      LaunchError: the name is empty or the launcher's own, or ``NAME`` alone is not set here.
    """
    name, equals, value = option.partition("=")
    if not name:
        raise LaunchError(f"--env {option!r} has no name; write --env NAME=VALUE or --env NAME")
    if name in SET_BY_LAUNCHER:
        raise LaunchError(f"--env {name} is the launcher's own variable; choose another name")
    if equals:
        return name, value
    if name not in environ:
        raise LaunchError(f"--env {name} is not set here; export it, or write --env {name}=VALUE")
    return name, environ[name]


def forwarded(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that go from this machine to every process."""
    return {
        name: value
        for name, value in environ.items()
        if matches(name, FORWARDED) and name not in SET_BY_LAUNCHER
    }


def for_worker(host_environ: Mapping[str, str], sent: Mapping[str, str]) -> dict[str, str]:
    """A script's whole environment: its host's own variables, then what was sent."""
    own = {name: value for name, value in host_environ.items() if matches(name, HOST)}
    return {**own, **sent}


def names_cuda(platforms: str) -> bool:
    """Whether a value of ``JAX_PLATFORMS`` has GPUs in its list."""
    return any(name.strip() in ("cuda", "gpu") for name in platforms.lower().split(","))


def for_platform(environ: Mapping[str, str], platform: str) -> dict[str, str]:
    """Variables by which JAX gets the platform of a job.

    On GPUs it is named, so that JAX fails where it cannot start them. Where a process sees none at
    all, JAX takes the CPU even then; ``stretto.launch.initialize`` refuses that.
    """
    if platform == "gpu":
        given = environ.get("JAX_PLATFORMS", "")
        return {PLATFORM: "cuda", "JAX_PLATFORMS": given if names_cuda(given) else "cuda,cpu"}
    return {
        PLATFORM: "cpu",
        "JAX_PLATFORMS": "cpu",
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
    }


# JAX takes GPU memory as it needs it, not most of it at once.
GPU_MEMORY_AS_NEEDED = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}

# Children write lines as they come, and never import a stray file of the working directory.
PYTHON_SETTINGS = {"PYTHONUNBUFFERED": "1", "PYTHONSAFEPATH": "1"}
