"""From the options of ``stretto run`` to the job that it starts."""

import os
import shlex
import socket
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from stretto.launch import environment
from stretto.launch.doctor.nccl import SHARING, why_no_process_per_gpu, why_no_shared_gpu
from stretto.launch.errors import LaunchError
from stretto.launch.planning import gpus, launchers, layout, platforms, slurm, survey
from stretto.launch.planning.choice import Chosen, choose_hosts, named_hosts
from stretto.launch.planning.cluster import Cluster, load_cluster
from stretto.launch.planning.job import Job
from stretto.launch.planning.launchers import AgentCommand, MpiRun
from stretto.launch.planning.modules import module_file
from stretto.launch.planning.options import RunOptions
from stretto.launch.planning.ranks import parse_ranks
from stretto.launch.planning.reach import check_hosts, silent_hosts
from stretto.launch.planning.srun import srun_commands

Starter = MpiRun | Literal["local", "srun"]


def make_job(
    options: RunOptions,
    environ: Mapping[str, str],
    make_folder: Callable[[], Path],
    lost: Collection[str] = (),
) -> tuple[Job, str]:
    """The job that the options describe, and a line on its devices if no option chose them.

    Args:
      make_folder: makes a folder that is removed with the job; called if mpirun needs a hostfile.
      lost: hosts that an earlier attempt has lost.

    Raises:
      LaunchError: the options contradict each other or the machine.
    """
    cluster = load_cluster(options.cluster) if options.cluster is not None else None
    of_cluster = dict(cluster.environment) if cluster else {}
    explicit = dict(environment.parse_env_option(option, environ) for option in options.env)
    known = {**environ, **of_cluster, **explicit}
    by_slurm = launchers.is_srun(options.launcher, environ)
    has_choice = options.num_devices is not None or options.min_devices is not None
    if has_choice and not (by_slurm or options.dry_run):
        others = _others(named_hosts(options, cluster))
        lost = {*lost, *silent_hosts(others, environ)}
    ask = partial(
        _count_gpus,
        dry_run=options.dry_run,
        environ=known,
        by_slurm=by_slurm,
        limit_s=options.start_timeout,
        devices_per_gpu=options.devices_per_gpu,
    )
    chosen = choose_hosts(options, cluster, known, ask, lost)
    platforms.check_explicit(chosen.platform, explicit)
    if "JAX_PLATFORMS" not in explicit:
        platforms.check_explicit(chosen.platform, of_cluster, "[environment]")
    if options.bind == "numa" and chosen.platform == "cpu":
        raise LaunchError(
            "--bind numa is for the cores beside a process's GPUs, and the job is on CPUs; leave it"
            " out"
        )
    per = options.processes_per
    if per is None and cluster is not None:
        per = cluster.processes_per
    plan = layout.plan(chosen.hosts, chosen.platform, per, options.devices_per_gpu)
    shared = options.devices_per_gpu > 1
    _check_nccl(plan, known, shared=shared)
    one_machine = set(plan.hosts) == {"localhost"}
    if one_machine:
        _check_interface(options.interface)
    starter = launchers.choose(options.launcher, environ, one_machine=one_machine)
    passed_on = environment.forwarded(environ)
    passed_on.pop(environment.CPU_DEVICES, None)  # the layout says, unless --env does
    if by_slurm:  # every node has its own, which Slurm sets there
        passed_on.pop(environment.CUDA_VISIBLE_DEVICES, None)
    commands, folder = _commands(options, plan, environ, make_folder, starter, cluster)
    job = Job(
        layout=plan,
        arguments=("-m",) * options.module + (options.script, *options.args),
        cwd=os.getcwd(),
        environ={
            **passed_on,
            **environment.PYTHON_SETTINGS,
            **environment.for_platform(environ, plan.platform),
            **(SHARING | environment.GPU_MEMORY_AS_NEEDED if shared else {}),
            **of_cluster,
            **explicit,
        },
        commands=commands,
        log_dir=options.log_dir,
        timeout_s=options.timeout,
        start_timeout_s=options.start_timeout,
        port=options.port,
        interface=options.interface or (cluster.interface if cluster else None),
        module_file=str(module_file(options.script, Path.cwd())) if options.module else "",
        bind=options.bind,
        tee=parse_ranks(options.tee, None if lost else len(plan.processes)),
        takes_stdin=options.stdin == "first",
        silence_limit_s=options.network_timeout,
        start_hint=_hint(starter),
        control_port=options.control_port,
        grace_s=options.grace,
        folder=folder,
    )
    return job, _devices_line(plan, chosen)


def _check_interface(name: str | None) -> None:
    """Refuse an interface that this machine lacks; a job on it alone never asks for its address."""
    known = [known for _, known in socket.if_nameindex()]
    if name is not None and name not in known:
        raise LaunchError(
            f"--interface {name}: this machine has no such network interface; it has "
            f"{', '.join(known)}"
        )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _others(hosts: Sequence[str]) -> list[str]:
    return [host for host in hosts if not survey.is_this_host(host)]


def _count_gpus(
    hosts: Sequence[str],
    *,
    dry_run: bool,
    environ: Mapping[str, str],
    by_slurm: bool,
    limit_s: float,
    devices_per_gpu: int,
) -> Mapping[str, int]:
    """Devices that the GPUs of the hosts offer: from Slurm, or from the hosts themselves."""
    environ = {**environ, "JAX_PLATFORMS": ""}
    found: Mapping[str, int] = (slurm.gpus_of_hosts(environ, hosts) if by_slurm else None) or {}
    if not found and (by_slurm or dry_run):  # assumed to be like this one; agents check
        found = dict.fromkeys(hosts, len(gpus.usable_gpus(environ)))
    if not found:
        if others := _others(hosts):
            check_hosts(others, environ, limit_s, _say)
        found = survey.count_gpus(hosts, environ)
    return {host: count * devices_per_gpu for host, count in found.items()}


def _commands(
    options: RunOptions,
    plan: layout.Layout,
    environ: Mapping[str, str],
    make_folder: Callable[[], Path],
    starter: Starter,
    cluster: Cluster | None,
) -> tuple[tuple[AgentCommand, ...], Path | None]:
    """What to run to have an agent for every process of the plan, and the folder it needs."""
    agent = launchers.agent_program(cluster.image if cluster else None)
    one_machine = set(plan.hosts) == {"localhost"}
    extra = _split(options.launcher_args)
    if starter == "local":
        if extra:
            raise LaunchError("--launcher-args are for mpirun or srun, and neither runs; drop it")
        return launchers.local_commands(plan, agent), None
    if starter == "srun":
        return srun_commands(plan, agent, environ, extra), None
    folder = hostfile = None
    if not one_machine:
        if not options.dry_run:
            check_hosts(list(plan.hosts), environ, options.start_timeout, _say)
        folder, hostfile = _write_hostfile(make_folder, plan, starter)
    command = launchers.mpirun_command(
        plan, agent, starter, hostfile, is_root=os.geteuid() == 0, extra=extra
    )
    return (command,), folder


def _write_hostfile(
    make_folder: Callable[[], Path], plan: layout.Layout, mpirun: MpiRun
) -> tuple[Path, Path]:
    """A folder, and in it the hostfile for mpirun."""
    try:
        folder = make_folder()
        hostfile = folder / "hostfile"
        hostfile.write_text(launchers.hostfile_text(plan, mpirun.flavour))
    except OSError as error:
        raise LaunchError(
            f"the hostfile for mpirun cannot be written ({error.strerror}); set TMPDIR to a folder "
            "that has room"
        ) from None
    return folder, hostfile


def _split(arguments: str) -> list[str]:
    try:
        return shlex.split(arguments)
    except ValueError as error:
        raise LaunchError(f"--launcher-args {arguments!r} cannot be split: {error}") from None


def _hint(starter: Starter) -> str:
    if starter == "srun":
        return (
            "check with squeue and sinfo that its nodes are up and free; on one node "
            "--launcher local does without srun"
        )
    if starter == "local":
        return "check the load of this machine"
    return "check that ssh to it works without a password"


def _check_nccl(plan: layout.Layout, environ: Mapping[str, str], *, shared: bool) -> None:
    """Processes of one GPU each reach each other through NCCL, if it is new enough."""
    if shared and (problem := why_no_shared_gpu(environ)):
        raise LaunchError(f"--devices-per-gpu cannot work here: {problem}")
    per_gpu = plan.processes_per == "gpu" and len(plan.processes) > len(plan.hosts)
    if plan.platform == "gpu" and per_gpu and (problem := why_no_process_per_gpu(environ)):
        raise LaunchError(f"--processes-per gpu cannot work here: {problem}")


def _devices_line(plan: layout.Layout, chosen: Chosen) -> str:
    """``4 CPU devices in 4 processes, because ...``; empty where the platform was asked for."""
    if not chosen.why:
        return ""
    kind = "GPU" if plan.platform == "gpu" else "CPU device"
    devices, processes = plan.num_gpus, len(plan.processes)
    return (
        f"stretto: {devices} {kind}{'s' * (devices > 1)} in {processes} "
        f"process{'es' * (processes > 1)}: {chosen.why}; --platform asks for one or the other"
    )
