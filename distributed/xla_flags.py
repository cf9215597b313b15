"""Flags of XLA to set before JAX is first used. Imports no JAX: `import stretto` runs it."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping

VARIABLE = "XLA_FLAGS"
NO_RECORDED_KERNELS = "--xla_gpu_enable_command_buffer=-CUSTOM_CALL"


def given(environ: Mapping[str, str] = os.environ) -> str:
    """The flags of the user, without the one that is set here."""
    return " ".join(x for x in environ.get(VARIABLE, "").split() if x != NO_RECORDED_KERNELS)


def exclude_kernels_from_command_buffers(environ: MutableMapping[str, str] = os.environ) -> None:
    """Has XLA launch kernels one by one, in place of recording them in a CUDA graph.

    What is recorded holds the addresses that peers' buffers had then, and XLA records again only
    when buffers of the same device move: a kernel would still read where a peer's operand used
    to be. Seen on 4 H100s with JAX 0.11.2. XLA reads its flags once, when JAX is first used, so
    `import stretto` does this; other flags are kept.
    """
    flags = environ.get(VARIABLE, "")
    if NO_RECORDED_KERNELS not in flags.split():
        environ[VARIABLE] = f"{flags} {NO_RECORDED_KERNELS}".strip()
