"""Settings of the distributed layer, each an environment variable read when it is needed."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, MutableMapping

WAIT_LIMIT_VARIABLE = "STRETTO_WAIT_LIMIT_S"
DEFAULT_WAIT_LIMIT_S = 30.0
XLA_FLAGS_VARIABLE = "XLA_FLAGS"
NO_RECORDED_KERNELS = "--xla_gpu_enable_command_buffer=-CUSTOM_CALL"
DEVICES_PER_NODE_VARIABLE = "STRETTO_DEVICES_PER_NODE"


def wait_limit_s() -> float:
    """Seconds that a wait inside a kernel may take before the kernel reports it and stops.

    Set by the environment variable `STRETTO_WAIT_LIMIT_S` (default 30). It is compiled into a
    kernel, so it must be the same on every process, and set before the kernel is first called.

    Raises:
      ValueError: the variable holds anything but a positive number.
    """
    text = os.environ.get(WAIT_LIMIT_VARIABLE)
    if text is None:
        return DEFAULT_WAIT_LIMIT_S
    try:
        limit = float(text)
    except ValueError:
        limit = math.nan
    if not 0 < limit < math.inf:
        raise ValueError(
            f"{WAIT_LIMIT_VARIABLE}={text!r} must be a positive number of seconds;"
            f" unset it for the default of {DEFAULT_WAIT_LIMIT_S:g}."
        )
    return limit


def devices_per_node() -> int | None:
    """How many devices, in the job's order, count as a node; None to go by where they really are.

    Set by the environment variable `STRETTO_DEVICES_PER_NODE`, which is for tests: one host stands
    for several nodes. It must be the same on every process, and set before a program is traced.

    Raises:
      ValueError: the variable holds anything but a positive whole number.
    """
    text = os.environ.get(DEVICES_PER_NODE_VARIABLE)
    if text is None:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(
            f"{DEVICES_PER_NODE_VARIABLE}={text!r} must be a positive whole number; unset it to go"
            " by the hosts that devices are on."
        )
    return int(text)


def exclude_kernels_from_command_buffers(environ: MutableMapping[str, str] = os.environ) -> None:
    """Has XLA launch kernels one by one, in place of recording them in a CUDA graph.

    What is recorded holds the addresses that peers' buffers had then, and XLA records again only
    when buffers of the same device move: a kernel would go on reading where a peer's operand used
    to be. Seen on 4 H100s with JAX 0.11.2. XLA reads its flags once, when JAX is first used, so
    `import stretto` does this; other flags are kept.
    """
    flags = environ.get(XLA_FLAGS_VARIABLE, "")
    if NO_RECORDED_KERNELS not in flags.split():
        environ[XLA_FLAGS_VARIABLE] = f"{flags} {NO_RECORDED_KERNELS}".strip()


@contextlib.contextmanager
def dumps_to(folder: str) -> Iterator[None]:
    """Makes Mosaic GPU write the PTX and the assembler's report of what it compiles to `folder`.

    It reads that from the process's environment and has no other way to be asked.
    """
    names = ("MOSAIC_GPU_DUMP_TO", "MOSAIC_GPU_DUMP_PTX", "MOSAIC_GPU_DUMP_PTXAS")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict(zip(names, (folder, "1", "1"), strict=True)))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
