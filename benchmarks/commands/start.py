"""The first steps of every command that measures, and its progress line."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable, Iterator

import jax
from rich.console import Console

from stretto.benchmarks import files
from stretto.launch import initialize

CPU_DEVICES = 4


def start_devices() -> None:
    """Joins the job that a launcher started, if one did; on a CPU, alone, makes several devices."""
    process = initialize()
    if process.num_processes == 1 and jax.config.jax_num_cpu_devices < 0:
        # Nobody has said how many. On GPUs it changes nothing.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", CPU_DEVICES)


def check_outputs(*outputs: tuple[str, pathlib.Path | None]) -> None:
    """Raises BenchmarkError, before hours of measuring, if a file could not be written after them.

    Args:
      outputs: options and the files that they name, or None. Only the first process writes.
    """
    if jax.process_index() == 0:
        for option, path in outputs:
            files.check_writable(option, path)


@contextlib.contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """A line of progress on the terminal; nothing without a terminal."""
    console = Console(stderr=True)
    if jax.process_index() != 0 or not console.is_terminal:
        yield lambda text: None
        return
    with console.status("starting") as status:
        yield status.update
