"""Processes on CPUs wait for each other before collectives between them run for the first time.

Gloo connects a group of devices when the first collective of that group runs, and gives the
processes 30 s to come to it, which nothing sets (jax-ml/jax#40831 is of its kind). From then on
XLA waits for half an hour, as kernels do. So they synchronise first, at JAX's coordinator.

Private JAX, checked on 0.11.2 and 0.12.0.1: without the class that is wrapped here nobody waits.
"""

from __future__ import annotations

import hashlib
import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src.interpreters import pxla

from stretto.distributed import settings
from stretto.distributed.private_jax import store

_LOOK_S = 1.0  # Python hears of no signal while it looks.
_COLLECTIVE = re.compile(
    r" (?:all-reduce|all-gather|reduce-scatter|all-to-all|collective-(?:permute|broadcast))"
    r"(?:-start)?\(.*"
)
_GROUPS = re.compile(r"(?:replica_groups|source_target_pairs)=(.*?)(?:, [a-z_]+=|$)")


def wait_before_first_collectives() -> bool:
    """From now on this process's programs wait so. Returns whether they will.

    They wait as long as `settings.start_limit_s` says, and then raise a TimeoutError.
    """
    return watch(Meetings().meet)


class Meetings:
    """Which groups of devices the processes have met for, each once, whichever thread comes."""

    def __init__(self):
        self._locks: dict[str, threading.Lock] = {}
        self._come: set[str] = set()
        self._met: set[str] = set()

    def meet(self, processes: Sequence[int], group: str) -> None:
        """Returns once all `processes` have come for `group`; TimeoutError if one does not."""
        with self._locks.setdefault(group, threading.Lock()):
            if group not in self._met:
                self._wait(processes, group)
                self._met.add(group)

    def _wait(self, processes: Sequence[int], group: str) -> None:
        own, limit_s = jax.process_index(), settings.start_limit_s()
        key = f"stretto/met/{hashlib.sha256(group.encode()).hexdigest()[:16]}"
        if group not in self._come:
            self._come.add(group)
            store.publish(f"{key}/{own}", "1")
        deadline = time.monotonic() + limit_s
        for process in processes:
            while not _has_come(f"{key}/{process}"):
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"process {process} has not come to its first collective with process"
                        f" {own} within {limit_s:g} s. All processes must run the same programs; if"
                        f" one takes longer to prepare, set {settings.START_LIMIT_VARIABLE}."
                    )


def _has_come(key: str) -> bool:
    try:
        store.look_up(key, _LOOK_S)
    except OSError:
        return False
    return True


def watch(meet: Callable[[Sequence[int], str], None]) -> bool:
    """Has `meet` called before a program runs for the first time, with each group of devices in it.

    That is, with all processes that run the program, and a text that is the same on each of them.
    """
    wrapped = getattr(pxla, "ExecuteReplicated", None)
    if wrapped is None:
        return False

    class Program(wrapped):
        __slots__ = ("_has_run",)

        def __call__(self, *args: Any) -> Any:
            if not hasattr(self, "_has_run"):
                processes, groups = _groups(self)
                for group in groups:
                    meet(processes, group)
                self._has_run = True
            return super().__call__(*args)

    pxla.ExecuteReplicated = Program
    return True


def _groups(program: Any) -> tuple[list[int], list[str]]:
    """The processes that run a program, and the groups of devices in its collectives.

    None where it runs in one process, or not by gloo.
    """
    implementation = jax.config.jax_cpu_collectives_implementation
    if program.xla_executable.local_devices()[0].platform != "cpu" or implementation != "gloo":
        return [], []
    shardings = *program.in_handler.in_shardings, *program.out_handler.out_shardings
    devices = set().union(*(getattr(sharding, "device_set", ()) for sharding in shardings))
    processes = sorted({device.process_index for device in devices})
    if len(processes) < 2:
        return [], []
    text = "\n".join(module.to_string() for module in program.xla_executable.hlo_modules())
    ids = sorted(device.id for device in devices)
    return processes, [f"{found} of {ids}" for found in groups_in(text)]


def groups_in(hlo: str) -> list[str]:
    """How a program's collectives group its devices, in the order of their first use."""
    found = (match[0] for match in _COLLECTIVE.finditer(hlo))
    groups = (match[1] if (match := _GROUPS.search(line)) else "" for line in found)
    return list(dict.fromkeys(groups))
