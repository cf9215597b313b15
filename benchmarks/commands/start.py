"""The first steps of every command that measures, and its progress line."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import jax
from rich.console import Console

from stretto.launch import initialize

CPU_DEVICES = 4


def start_devices() -> None:
    """Joins the job that a launcher started, if one did; on a CPU, alone, makes several devices."""
    process = initialize()
    if process.num_processes == 1 and jax.config.jax_num_cpu_devices < 0:
        # Nobody has said how many. On GPUs it changes nothing.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", CPU_DEVICES)


@contextlib.contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """A line of progress on the terminal; nothing without a terminal."""
    console = Console(stderr=True)
    if jax.process_index() != 0 or not console.is_terminal:
        yield lambda text: None
        return
    with console.status("starting") as status:
        yield status.update
