"""``stretto run``: from its options to a job that has ended."""

import contextlib
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from stretto.launch import environment
from stretto.launch.commands.after_script import hint
from stretto.launch.commands.dry_run import describe
from stretto.launch.commands.make_job import make_job
from stretto.launch.commands.on_cpus import check_script
from stretto.launch.errors import CANNOT_START, LaunchError
from stretto.launch.planning.job import Job
from stretto.launch.planning.modules import module_file
from stretto.launch.planning.options import RunOptions, known_options, parse
from stretto.launch.process.detection import inside_launcher
from stretto.launch.supervision import supervisor
from stretto.launch.supervision.console import Console
from stretto.launch.supervision.logs import run_folder
from stretto.launch.supervision.report import TIMEOUT_STATUS
from stretto.launch.supervision.session import Interrupted

DECIDE = {"-n", "--dry-run"}
"""Options that decide what is started."""
_LONGEST_SILENCE_S = 86_400  # Linux waits up to 32,767 s between two probes of a connection
_LONGEST_GRACE_S = 1_000_000  # and up to 2,147,483 s for an event


def main(argv: list[str]) -> int:
    """Run the command; returns its exit status."""
    options = parse(argv)
    hint("stretto run", argv, options.args, DECIDE)
    environ = environment.current()
    _check(options, environ)
    if options.dry_run:
        with _folder_when_needed() as folder:
            print(describe(make_job(options, environ, folder)[0]))
        return 0
    if options.log_dir is not None:
        options = replace(options, log_dir=run_folder(options.log_dir))
    status = _run(options, environ)
    if status:
        hint("stretto run", argv, options.args, known_options() - DECIDE)
    return status


def _check(options: RunOptions, environ: Mapping[str, str]) -> None:
    """Refuse what cannot work before anything is started."""
    if _working_directory_is_gone():
        raise LaunchError("the working directory does not exist any more; cd to one that does")
    if options.module:
        module_file(options.script, Path.cwd())
    else:
        check_script(options.script)
    for name, value, may_be_zero, most in (
        ("--timeout", options.timeout, False, math.inf),
        ("--start-timeout", options.start_timeout, False, math.inf),
        ("--grace", options.grace, True, _LONGEST_GRACE_S),
        ("--network-timeout", options.network_timeout, False, _LONGEST_SILENCE_S),
        ("--restarts", options.restarts, True, math.inf),
    ):
        if value is not None and not (value > 0 or (may_be_zero and value == 0)):  # nan is neither
            least = "at least 0" if may_be_zero else "more than 0"
            raise LaunchError(f"{name} {value:g} must be {least}")
        if value is not None and value > most:
            raise LaunchError(f"{name} {value:g} must be at most {most}")
    for name, port in (("--port", options.port), ("--control-port", options.control_port)):
        if not 0 <= port < 65536:
            raise LaunchError(f"{name} {port} must be from 1 to 65535, or 0 for a free one")
    outer = inside_launcher(environ)
    # A script of a job that starts another job means it; `mpirun -n 4 stretto run` does not.
    if outer is not None and outer.launcher != "stretto":
        raise LaunchError(
            f"stretto run is itself process {outer.process_id} of {outer.num_processes} started by "
            f"{outer.launcher}; run the script directly there, it finds its place by "
            "stretto.initialize()"
        )


def _working_directory_is_gone() -> bool:
    try:
        os.getcwd()
    except OSError:
        return True
    return False


@contextlib.contextmanager
def _folder_when_needed() -> Iterator[Callable[[], Path]]:
    """A function that makes a folder for temporary files, which is removed at the end.

    Most jobs need none, and one that nobody made cannot be left behind by a killed supervisor.
    """
    with contextlib.ExitStack() as opened:

        def make() -> Path:
            return Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="stretto-")))

        yield make


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
        with _folder_when_needed() as folder:
            job, devices = make_job(options, environ, folder, lost)
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
