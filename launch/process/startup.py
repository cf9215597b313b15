"""``stretto.launch.initialize``: a script joins the other processes of its job.

Under ``stretto run`` everything is in the environment. Under bare ``mpirun``, ``srun`` or
``torchrun`` the process id and count come from that launcher, and the processes agree on a
coordinator here (``coordinator.py``).
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stretto.distributed import xla_flags
from stretto.launch import environment
from stretto.launch.errors import LaunchError
from stretto.launch.planning import gpus, network
from stretto.launch.process import heartbeat
from stretto.launch.process.coordinator import agree_on_coordinator
from stretto.launch.process.detection import Launched, detect


@dataclass(frozen=True)
class Process:
    """This process's place in its job.

    ``coordinator`` is process 0's ``address:port``, empty for a job of one process.
    ``local_device_ids`` are the GPUs of this process as CUDA numbers them under
    ``CUDA_VISIBLE_DEVICES``; None means all that it sees. ``restart`` counts from 0 under
    ``--restarts``.
    """

    process_id: int = 0
    num_processes: int = 1
    local_process_id: int = 0
    num_local_processes: int = 1
    coordinator: str = ""
    local_device_ids: tuple[int, ...] | None = None
    launcher: str = ""
    restart: int = 0


_process: Process | None = None


def initialize(*, timeout_s: float = 60.0) -> Process:
    """Make this process one of its job, before anything reads JAX's devices.

    Calls ``jax.distributed.initialize`` if the job has more than one process, and otherwise
    only limits JAX to the job's GPUs where it does not use all. In a job on GPUs it starts JAX's
    platform, to see that it is theirs. Where each process has one GPU it adds the flag of XLA to
    ``XLA_FLAGS`` that kernels between processes need. It leaves SIGTERM to the script, until that
    asks ``multihost_utils.reached_preemption_sync_point``. Calling it again does nothing more.

    Args:
      timeout_s: how long to wait for the other processes, in seconds.

    Returns:
      This process's place; the same record on every call.

    Raises:
      LaunchError: the launcher's variables contradict each other, there are fewer GPUs than
        processes, the coordinator's port is taken, the MPI library counts other processes, or the
        job was planned on GPUs and JAX found none.
    """
    global _process
    if _process is None:
        environ = environment.current()
        launched = detect(environ)
        process = Process() if launched is None else _place(launched, environ, timeout_s)
        if process.launcher not in ("", "stretto"):
            _end_job_on_exception()
        if process.num_processes > 1 and has_one_gpu(process, environ):
            xla_flags.share_memory_of_kernels(environment.own())
        _join(process, timeout_s)
        if environ.get(environment.PLATFORM) == "cuda" and process.launcher == "stretto":
            _check_on_gpus()
        _process = process
    return _process


def _place(launched: Launched, environ: Mapping[str, str], timeout_s: float) -> Process:
    """The record for a launched process; settles coordinator and devices."""
    _check_mpi(launched)
    many = launched.num_processes > 1
    coordinator = environ.get(environment.COORDINATOR, "")
    if many and not coordinator:
        coordinator = agree_on_coordinator(launched, environ, timeout_s)
    given = environ.get(environment.LOCAL_DEVICE_IDS)
    if given:
        devices = tuple(map(int, given.split(",")))
    elif launched.launcher == "stretto":
        devices = None
    else:
        devices = devices_of_local_process(launched, len(gpus.usable_gpus(environ)))
    return Process(
        process_id=launched.process_id,
        num_processes=launched.num_processes,
        local_process_id=launched.local_process_id,
        num_local_processes=launched.num_local_processes,
        coordinator=coordinator if many else "",
        local_device_ids=devices,
        launcher=launched.launcher,
        restart=int(environ.get(environment.RESTART, "0")),
    )


def devices_of_local_process(launched: Launched, num_gpus: int) -> tuple[int, ...] | None:
    """The GPUs of one of several processes on a host, for launchers that do not assign them.

    A process alone on its host takes all. Several share evenly what they all see; where each
    sees just one, its launcher has narrowed ``CUDA_VISIBLE_DEVICES`` itself.

    Raises:
      LaunchError: the processes cannot share the GPUs evenly.
    """
    processes = launched.num_local_processes
    if num_gpus <= 1 or processes == 1:
        return None
    if num_gpus % processes:
        raise LaunchError(
            f"{processes} processes on this host cannot share its {num_gpus} GPUs evenly; "
            f"start {num_gpus} processes, or one"
        )
    share = num_gpus // processes
    first = launched.local_process_id * share
    return tuple(range(first, first + share))


def has_one_gpu(process: Process, environ: Mapping[str, str]) -> bool:
    """Whether this is a process per GPU, by whose kernels memory is shared between processes."""
    if process.local_device_ids is not None:
        return len(process.local_device_ids) == 1
    return len(gpus.usable_gpus(environ)) == 1


def _check_mpi(launched: Launched) -> None:
    """Where MPI is in use already, it must count the same processes as its launcher."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized():
        return
    size = mpi.COMM_WORLD.Get_size()
    if size != launched.num_processes:
        raise LaunchError(
            f"the launcher started {launched.num_processes} processes, but mpi4py's MPI library "
            f"counts {size}; its mpirun is of another kind: see stretto doctor"
        )


def _join(process: Process, timeout_s: float) -> None:
    import jax

    if process.num_processes == 1:
        if process.local_device_ids is not None:
            _limit_devices(process.local_device_ids)
        return
    address, _, port = process.coordinator.rpartition(":")
    if process.process_id == 0 and network.port_is_taken(address.strip("[]"), int(port)):
        raise LaunchError(
            f"port {port} of {address}, where process 0 serves the others, is taken; "
            "start the job again, or with another --port"
        )
    from stretto.distributed.private_jax import first_runs, preemption, reduce_scatter

    heartbeat.tell_that_it_joins()
    with preemption.when_asked_for():
        jax.distributed.initialize(
            coordinator_address=process.coordinator,
            coordinator_bind_address=process.coordinator,
            num_processes=process.num_processes,
            process_id=process.process_id,
            local_device_ids=process.local_device_ids,
            cluster_detection_method="deactivate",
            initialization_timeout=int(timeout_s),
        )
    heartbeat.tell_programs()
    first_runs.wait_before_first_collectives()
    reduce_scatter.make_of_sums()


def _check_on_gpus() -> None:
    """JAX silently uses the CPU where a process sees no GPU, even with ``cuda,cpu``."""
    import jax

    found = jax.default_backend()
    if found != "gpu":
        raise LaunchError(
            f"this job was planned on GPUs, and JAX came up on {found!r} on host "
            f"{network.host_name()} (JAX_PLATFORMS={jax.config.jax_platforms}); "
            "see stretto doctor there, or run on the CPU with --platform cpu"
        )


def _limit_devices(device_ids: Sequence[int]) -> None:
    """Let JAX use these GPUs only; CUDA still sees all, which NCCL and NVLink need."""
    import jax

    jax.config.update("jax_cuda_visible_devices", ",".join(map(str, device_ids)))


def _end_job_on_exception() -> None:
    """Under another launcher than Stretto's, an uncaught exception ends this process at once.

    The ordinary exit would wait in JAX's exit barrier for the other processes, which wait for
    this one; ended at once, the launcher sees it and ends them.
    """
    import os

    show = sys.excepthook

    def show_and_end(kind, error, trace):
        show(kind, error, trace)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)

    sys.excepthook = show_and_end
