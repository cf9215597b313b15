"""Running a user's script in this process, on CPU devices, as the commands do that need no GPU."""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

from stretto.launch.errors import LaunchError
from stretto.launch.worker import below


def check_script(script: str) -> None:
    """Raises LaunchError if there is no such file."""
    if not Path(script).is_file():
        found = "is no file" if Path(script).exists() else "does not exist"
        raise LaunchError(f"script {script} {found}; give the path of a Python file")


def show(error: Exception, script: str) -> None:
    """Prints an exception of the script's own as `python script` would."""
    trace = below(script, error.__traceback__)
    sys.excepthook(type(error), error.with_traceback(trace), trace)


def place(error: Exception, script: str) -> str:
    """The line of the script, as "file:line", at which `error` left it."""
    frames = traceback.extract_tb(below(script, error.__traceback__))
    return f"{os.path.basename(script)}:{frames[0].lineno}" if frames else script


def use_devices(count: int) -> None:
    """Makes JAX see `count` CPU devices and nothing else."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        if jax.device_count() != count:
            raise LaunchError(
                f"JAX already runs on {jax.device_count()} devices, not {count}; start the command"
                " in a process of its own"
            ) from None


def run(script: str, args: Sequence[str]) -> int:
    """Runs the script as `python script args` would; returns the status that it exits with."""
    with _arguments([script, *args]):
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            if end.code is None or isinstance(end.code, int):
                return end.code or 0
            print(end.code, file=sys.stderr)
            return 1
    return 0


@contextlib.contextmanager
def _arguments(argv: list[str]) -> Iterator[None]:
    """Sets `sys.argv`, and puts the script's folder where it finds its neighbours."""
    before = sys.argv, sys.path[:]
    sys.argv = argv
    sys.path.insert(0, os.path.dirname(os.path.abspath(argv[0])))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = before
