"""Processes that a bare launcher started agree on the address of process 0.

On one host through a small file in the temporary folder, named after the launcher's job; over
several hosts under MPI by a broadcast (which needs mpi4py), under Slurm and torchrun by what
their variables tell every process alike.
"""

import contextlib
import hashlib
import os
import socket
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from stretto.launch.errors import LaunchError
from stretto.launch.planning import network
from stretto.launch.planning.slurm import expand_nodelist
from stretto.launch.process.detection import Launched

_POLL_S = 0.02
_FIRST_DERIVED_PORT = 20_000  # below Linux's range of ports for outgoing connections
_NUM_DERIVED_PORTS = 12_000
# Variables that differ between two jobs of a launcher, and are equal in all processes of a job.
_JOB_NAMES = (
    "PMIX_NAMESPACE",
    "PMIX_SERVER_URI2",
    "OMPI_MCA_orte_hnp_uri",
    "OMPI_MCA_ess_base_jobid",
    "PMI_ID_JOB",
    "PMI_PORT",
    "PMI_FD_JOB",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "TORCHELASTIC_RUN_ID",
    "MASTER_ADDR",
    "MASTER_PORT",
)


def agree_on_coordinator(launched: Launched, environ: Mapping[str, str], timeout_s: float) -> str:
    """``address:port`` of process 0, the same on every process.

    Raises:
      LaunchError: process 0 was not heard from in time, or MPI is needed and does not fit.
    """
    if launched.num_local_processes == launched.num_processes:
        return _by_file(launched, environ, timeout_s)
    if launched.launcher == "slurm":
        hosts = expand_nodelist(environ.get("SLURM_STEP_NODELIST", "")) or [""]
        return f"{_address(hosts[0])}:{_derived_port(environ)}"
    if launched.launcher == "torchrun":
        return f"{_address(environ.get('MASTER_ADDR', ''))}:{_derived_port(environ)}"
    return _by_broadcast(launched)


def job_name(environ: Mapping[str, str]) -> str:
    """A short name that all processes of a job share and no other job has."""
    told = [f"{name}={environ[name]}" for name in _JOB_NAMES if name in environ]
    # MPICH names nothing; there the processes of a job share their parent, its proxy.
    parts = told or [f"parent={os.getppid()}"]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]


def _by_file(launched: Launched, environ: Mapping[str, str], timeout_s: float) -> str:
    folder = Path(tempfile.gettempdir()) / f"stretto-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise LaunchError(f"{folder} belongs to another user; remove it or set TMPDIR")
    path = folder / job_name(environ)
    if launched.process_id == 0:
        coordinator = f"{network.LOOPBACK}:{network.free_port()}"
        draft = path.with_suffix(f".{os.getpid()}")
        draft.write_text(f"{coordinator} {os.getpid()}")
        draft.replace(path)
        return coordinator
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, ValueError):
            coordinator, pid = path.read_text().split()
            os.kill(int(pid), 0)  # raises if the file is a dead job's
            return coordinator
        time.sleep(_POLL_S)
    raise LaunchError(
        f"process {launched.process_id} heard nothing from process 0 within {timeout_s:g} s; "
        "does it call stretto.initialize() too?"
    )


def _by_broadcast(launched: Launched) -> str:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise LaunchError(
            f"mpirun over several hosts needs mpi4py to agree on a coordinator ({error}); "
            "install it, or use stretto run"
        ) from None
    world = MPI.COMM_WORLD
    if world.Get_size() != launched.num_processes:
        raise LaunchError(
            f"mpirun started {launched.num_processes} processes, but mpi4py's MPI library counts "
            f"{world.Get_size()}; they are of different kinds: see stretto doctor"
        )
    coordinator = None
    if launched.process_id == 0:
        named = [a for a in network.resolve(socket.gethostname()) if not a.startswith("127.")]
        address = (named or network.interface_addresses() or [network.LOOPBACK])[0]
        coordinator = f"{address}:{network.free_port(address)}"
    return world.bcast(coordinator)


def _address(host: str) -> str:
    addresses = network.resolve(host)
    if not addresses:
        raise LaunchError(f"the first host, {host!r}, does not resolve; check DNS or /etc/hosts")
    return addresses[0]


def _derived_port(environ: Mapping[str, str]) -> int:
    return _FIRST_DERIVED_PORT + int(job_name(environ), 16) % _NUM_DERIVED_PORTS
