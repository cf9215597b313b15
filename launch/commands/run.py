"""``stretto run``: from its options to a job that has ended."""

import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from stretto.launch import environment
from stretto.launch.commands.dry_run import describe
from stretto.launch.commands.make_job import make_job
from stretto.launch.errors import CANNOT_START, LaunchError
from stretto.launch.planning.job import Job
from stretto.launch.planning.modules import module_file
from stretto.launch.planning.options import RunOptions, parse
from stretto.launch.process.detection import inside_launcher
from stretto.launch.supervision import supervisor
from stretto.launch.supervision.console import Console
from stretto.launch.supervision.logs import run_folder
from stretto.launch.supervision.report import TIMEOUT_STATUS
from stretto.launch.supervision.session import Interrupted


def main(argv: list[str]) -> int:
    """Run the command; returns its exit status."""
    options = parse(argv)
    environ = environment.current()
    _check(options, environ)
    if options.dry_run:
        with tempfile.TemporaryDirectory(prefix="stretto-") as folder:
            print(describe(make_job(options, environ, Path(folder))[0]))
        return 0
    if options.log_dir is not None:
        options = replace(options, log_dir=run_folder(options.log_dir))
    return _run(options, environ)


def _check(options: RunOptions, environ: Mapping[str, str]) -> None:
    """Refuse what cannot work before anything is started."""
    if options.module:
        module_file(options.script, Path.cwd())
    elif not Path(options.script).is_file():
        raise LaunchError(f"script {options.script} does not exist; give the path of a Python file")
    for name, value, least in (
        ("--timeout", options.timeout, 0),
        ("--start-timeout", options.start_timeout, 0),
        ("--grace", options.grace, -1),
        ("--network-timeout", options.network_timeout, 0),
        ("--restarts", options.restarts, -1),
    ):
        if value is not None and value <= least:
            raise LaunchError(f"{name} {value:g} must be more than {least}")
    for name, port in (("--port", options.port), ("--control-port", options.control_port)):
        if not 0 <= port < 65536:
            raise LaunchError(f"{name} {port} must be from 1 to 65535, or 0 for a free one")
    outer = inside_launcher(environ)
    # A script of a job that starts another job means it; `mpirun -n 4 stretto run` does not.
    if outer is not None and outer.launcher != "stretto":
        raise LaunchError(
            f"stretto run is itself process {outer.process_id} of {outer.num_processes} started by "
            f"{outer.launcher}; run the script directly there, it finds its place by "
            "stretto.launch.initialize()"
        )


def _run(options: RunOptions, environ: Mapping[str, str]) -> int:
    """Run a job, again after a failure with --restarts; returns the last status.

    Raises:
      LaunchError: it could not be started, at first or at last.
    """
    lost: set[str] = set()
    for attempt in range(options.restarts + 1):
        is_last = attempt == options.restarts
        try:
            status = _attempt(options, environ, attempt, lost, is_last=is_last)
        except Interrupted as interrupt:
            return interrupt.status
        if status == 0 or is_last:
            return status
        print(
            f"stretto: starting again, restart {attempt + 1} of {options.restarts}",
            file=sys.stderr,
            flush=True,
        )
    raise ValueError(f"restarts={options.restarts} must be at least 0")


def _attempt(
    options: RunOptions,
    environ: Mapping[str, str],
    attempt: int,
    lost: set[str],
    *,
    is_last: bool,
) -> int:
    """Plan the job again and run it once: spare hosts replace lost ones.

    A job that cannot be started is a failed attempt, if it ran before: a host may return. One
    that never ran would not be mended by trying again.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="stretto-") as folder:
            job, devices = make_job(options, environ, Path(folder), lost)
            job = replace(job, attempt=attempt)
            return _run_once(job, devices if attempt == 0 else "", lost)
    except LaunchError as error:
        if is_last or (attempt == 0 and error.status == CANNOT_START):
            raise
        print(f"stretto: {error}", file=sys.stderr, flush=True)
        return error.status


def _run_once(job: Job, devices: str, lost: set[str]) -> int:
    """Run an attempt; ``devices`` is a line to begin with, ``lost`` gets hosts that it loses."""
    num_processes = len(job.layout.processes)
    console = Console(num_processes, job.log_dir, job.attempt, job.tee)
    in_haste = True
    try:
        if devices:
            console.say(devices)
        status = supervisor.run(job, console, lost)
        in_haste = status == TIMEOUT_STATUS
        return status
    except Interrupted:
        console.say(f"stretto: interrupted; all {num_processes} processes are ended")
        raise
    finally:
        console.close(in_haste=in_haste)
