"""``stretto run``: from its options to a running job."""

import os
import tempfile
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from stretto.launch import environment
from stretto.launch.commands.dry_run import describe
from stretto.launch.doctor.nccl import why_no_process_per_gpu
from stretto.launch.errors import LaunchError
from stretto.launch.planning import gpus, launchers, layout
from stretto.launch.planning.cluster import load_cluster
from stretto.launch.planning.hosts import choose_hosts
from stretto.launch.planning.job import Job
from stretto.launch.planning.launchers import AgentCommand
from stretto.launch.planning.options import RunOptions, parse
from stretto.launch.planning.reach import check_hosts
from stretto.launch.process.detection import inside_launcher
from stretto.launch.supervision import supervisor
from stretto.launch.supervision.console import Console
from stretto.launch.supervision.session import Interrupted


def main(argv: list[str]) -> int:
    """Run the command; returns its exit status."""
    options = parse(argv)
    environ = environment.current()
    _check(options, environ)
    with tempfile.TemporaryDirectory(prefix="stretto-") as folder:
        job = make_job(options, environ, Path(folder))
        if options.dry_run:
            print(describe(job))
            return 0
        return _run(job, options.restarts)


def _check(options: RunOptions, environ: Mapping[str, str]) -> None:
    """Refuse what cannot work before anything is started."""
    if not Path(options.script).is_file():
        raise LaunchError(f"script {options.script} does not exist; give the path of a Python file")
    for name, value, least in (
        ("--timeout", options.timeout, 0),
        ("--start-timeout", options.start_timeout, 0),
        ("--restarts", options.restarts, -1),
    ):
        if value is not None and value <= least:
            raise LaunchError(f"{name} {value:g} must be more than {least}")
    if not 0 <= options.port < 65536:
        raise LaunchError(f"--port {options.port} must be from 1 to 65535, or 0 for a free one")
    outer = inside_launcher(environ)
    if outer is not None:
        raise LaunchError(
            f"stretto run is itself process {outer.process_id} of {outer.num_processes} started by "
            f"{outer.launcher}; run the script directly there, it finds its place by "
            "stretto.launch.initialize()"
        )


def make_job(options: RunOptions, environ: Mapping[str, str], folder: Path) -> Job:
    """The job that the options describe; ``folder`` takes a hostfile for mpirun if one is needed.

    Raises:
      LaunchError: the options contradict each other or the machine.
    """
    cluster = load_cluster(options.cluster) if options.cluster is not None else None
    of_cluster = dict(cluster.environment) if cluster else {}
    explicit = dict(environment.parse_env_option(option, environ) for option in options.env)
    visible = gpus.usable_gpus({**environ, **of_cluster, **explicit})
    chosen = choose_hosts(options, cluster, environ, visible)
    per = options.processes_per or (cluster.processes_per if cluster else None)
    plan = layout.plan(chosen.hosts, chosen.platform, per)
    _check_nccl(plan, {**environ, **of_cluster, **explicit})
    passed_on = environment.forwarded(environ)
    passed_on.pop(environment.CPU_DEVICES, None)  # the layout says, unless --env does
    return Job(
        layout=plan,
        arguments=(options.script, *options.args),
        cwd=os.getcwd(),
        environ={
            **passed_on,
            **environment.PYTHON_SETTINGS,
            **environment.for_platform(environ, plan.platform),
            **of_cluster,
            **explicit,
        },
        commands=_commands(options, plan, environ, folder, cluster.image if cluster else None),
        log_dir=options.log_dir,
        timeout_s=options.timeout,
        start_timeout_s=options.start_timeout,
        port=options.port,
        interface=options.interface or (cluster.interface if cluster else None),
    )


def _commands(
    options: RunOptions,
    plan: layout.Layout,
    environ: Mapping[str, str],
    folder: Path,
    image: str | None,
) -> tuple[AgentCommand, ...]:
    """What to run to have an agent for every process of the plan."""
    agent = launchers.agent_program(image)
    one_machine = set(plan.hosts) == {"localhost"}
    starter = launchers.choose(options.launcher, environ, one_machine=one_machine)
    if starter == "local":
        return launchers.local_commands(plan, agent)
    if starter == "srun":
        return (launchers.srun_command(plan, agent),)
    hostfile = None
    if not one_machine:
        if not options.dry_run:
            check_hosts(list(plan.hosts), environ)
        hostfile = folder / "hostfile"
        hostfile.write_text(launchers.hostfile_text(plan, starter.flavour))
    is_root = os.geteuid() == 0
    return (launchers.mpirun_command(plan, agent, starter, hostfile, is_root=is_root),)


def _check_nccl(plan: layout.Layout, environ: Mapping[str, str]) -> None:
    """Processes of one GPU each reach each other through NCCL, if it is new enough."""
    per_gpu = plan.processes_per == "gpu" and len(plan.processes) > len(plan.hosts)
    if plan.platform == "gpu" and per_gpu and (problem := why_no_process_per_gpu(environ)):
        raise LaunchError(f"--processes-per gpu cannot work here: {problem}")


def _run(job: Job, restarts: int) -> int:
    """Run a job, again after a failure if that was asked for; returns the last status."""
    num_processes = len(job.layout.processes)
    for attempt in range(restarts + 1):
        with closing(Console(num_processes, job.log_dir, attempt)) as console:
            try:
                status = supervisor.run(replace(job, attempt=attempt), console)
            except Interrupted as interrupt:
                console.say(f"stretto: interrupted; all {num_processes} processes are ended")
                return interrupt.status
            if status == 0 or attempt == restarts:
                break
            console.say(f"stretto: starting again, restart {attempt + 1} of {restarts}")
    return status
