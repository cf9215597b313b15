"""Settings of the distributed layer, each an environment variable read when it is needed."""

from __future__ import annotations

import contextlib
import math
import os
import warnings
from collections.abc import Iterator, Mapping

import jax

WAIT_LIMIT_VARIABLE = "STRETTO_WAIT_LIMIT_S"
DEFAULT_WAIT_LIMIT_S = 30.0
HEAP_VARIABLE = "STRETTO_HEAP"
START_LIMIT_VARIABLE = "STRETTO_START_LIMIT_S"
DEFAULT_START_LIMIT_S = 1800.0
LONGEST_LIMIT_S = 1e9
"""Of limits: kernels count nanoseconds in 64 bits."""
DEVICES_PER_NODE_VARIABLE = "STRETTO_DEVICES_PER_NODE"
FREE_MULTIPROCESSORS_VARIABLE = "STRETTO_FREE_MULTIPROCESSORS"


# Set by `wait_limit`. Part of the key of JAX's caches, since the limit is compiled in.
_wait_limit_s = jax.make_user_context(default_value=None)
_heap = jax.make_user_context(default_value=None)  # Set by `heap`.
_devices_per_node = jax.make_user_context(default_value=None)  # Set by `nodes_of`.


def wait_limit_s() -> float:
    """Seconds that a wait inside a kernel may take before the kernel reports it and stops.

    Set by the environment variable `STRETTO_WAIT_LIMIT_S` (default 30). It is compiled into a
    kernel, so it must be the same on every process, and set before the kernel is first called.
    0 means no limit, which is infinity here, and a warning: a missing signal then hangs
    the job without a report.

    Raises:
      ValueError: the variable holds anything but a number of seconds from 0 to 1e9.
    """
    chosen = _wait_limit_s.value
    if chosen is not None:
        return chosen or math.inf
    return _seconds(WAIT_LIMIT_VARIABLE, DEFAULT_WAIT_LIMIT_S, "a signal that never comes")


def start_limit_s() -> float:
    """Seconds that a kernel waits for its peers to start it, before it reports them and stops.

    Set by the environment variable `STRETTO_START_LIMIT_S` (default 1800), like the limit of other
    waits; it is so much longer because between kernels a process may load data or save its state.
    Processes on CPUs wait as long before their first collective (`jax_first_runs`).

    Raises:
      ValueError: the variable holds anything but a number of seconds from 0 to 1e9.
    """
    return _seconds(START_LIMIT_VARIABLE, DEFAULT_START_LIMIT_S, "a device that never starts one")


def _seconds(variable: str, default: float, danger: str) -> float:
    text = os.environ.get(variable)
    if text is None:
        return default
    try:
        limit = float(text)
    except ValueError:
        limit = math.nan
    if not 0 <= limit <= LONGEST_LIMIT_S:
        raise ValueError(
            f"{variable}={text!r} must be a number of seconds to {LONGEST_LIMIT_S:.0f}, 0 for"
            f" no limit; unset it for the default of {default:g}."
        )
    if limit == 0:
        warnings.warn(
            f"{variable}={text}: waits inside kernels have no limit, so {danger} hangs the job"
            " without a report.",
            stacklevel=3,
        )
    return limit or math.inf


def wait_limit(seconds: float) -> contextlib.AbstractContextManager[None]:
    """Kernels that are traced inside have this limit, 0 for none, instead of the environment's.

    It must be the same on every process. For measurements and tests. Waits for peers to start have
    a limit of their own.
    """
    if not 0 <= seconds <= LONGEST_LIMIT_S:
        raise ValueError(
            f"seconds={seconds} must be a number to {LONGEST_LIMIT_S:.0f}, 0 for no limit."
        )
    return _wait_limit_s(float(seconds))


def devices_per_node() -> int | None:
    """How many devices, in the job's order, count as a node; None to go by where they really are.

    Set by the environment variable `STRETTO_DEVICES_PER_NODE`, which is for tests: one host acts
    for several nodes. It must be the same on every process, and set before a program is traced.

    Raises:
      ValueError: the variable holds anything but a positive whole number.
    """
    if _devices_per_node.value is not None:
        return _devices_per_node.value
    return _whole_number(DEVICES_PER_NODE_VARIABLE, 1, "to go by the hosts that devices are on")


def nodes_of(devices: int) -> contextlib.AbstractContextManager[None]:
    """Programs that are traced inside treat that many devices as a node.

    It must be the same on every process. For tests and measurements.
    """
    if devices < 1:
        raise ValueError(f"devices={devices} must be at least 1.")
    return _devices_per_node(devices)


def free_multiprocessors() -> int | None:
    """How many multiprocessors of a device kernels leave free; None for what is usual.

    Set by the environment variable `STRETTO_FREE_MULTIPROCESSORS`, for programs in which XLA's
    collectives run beside kernels: the two must both find room. It must be the same on every
    process, and set before a program is traced.

    Raises:
      ValueError: the variable holds anything but a whole number.
    """
    return _whole_number(FREE_MULTIPROCESSORS_VARIABLE, 0, "for a number that has been found good")


def heap_is_wanted() -> bool:
    """Whether kernels may keep counters in memory that outlives them (`heap`).

    Set by the environment variable `STRETTO_HEAP`: 0 for a machine on which that fails; kernels
    then start later, by XLA's barrier. It must be the same on every process, and set before a
    program is traced.

    Raises:
      ValueError: the variable holds anything but 0 or 1.
    """
    if _heap.value is not None:
        return _heap.value
    text = os.environ.get(HEAP_VARIABLE, "1")
    if text not in ("0", "1"):
        raise ValueError(f"{HEAP_VARIABLE}={text!r} must be 0 or 1; unset it for 1.")
    return text == "1"


def heap(wanted: bool) -> contextlib.AbstractContextManager[None]:
    """Programs that are traced inside use the heap or do not, instead of the environment's setting.

    It must be the same on every process. For measurements and tests.
    """
    return _heap(wanted)


def _whole_number(variable: str, least: int, unset: str) -> int | None:
    text = os.environ.get(variable)
    if text is None:
        return None
    if not text.isdecimal() or int(text) < least:
        raise ValueError(
            f"{variable}={text!r} must be a whole number of {least} or more; unset it {unset}."
        )
    return int(text)


def environ() -> Mapping[str, str]:
    """The environment of this process, for what is decided by variables of others (`xla_flags`)."""
    return os.environ


@contextlib.contextmanager
def changed(values: Mapping[str, str]) -> Iterator[None]:
    """Gives variables of this process's environment other values inside it."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def dumps_to(folder: str) -> Iterator[None]:
    """Makes Mosaic GPU write to `folder` what it compiles: PTX, the assembler's report, resources.

    It reads these settings from the process's environment only.
    """
    what = ("PTX", "PTXAS", "RESOURCES")
    wanted = {"MOSAIC_GPU_DUMP_TO": folder} | {f"MOSAIC_GPU_DUMP_{name}": "1" for name in what}
    with changed(wanted):
        yield
