"""Flags of XLA in an environment, to set before JAX is first used.

Imports no JAX, since `import stretto` calls it.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

VARIABLE = "XLA_FLAGS"
NO_RECORDED_KERNELS = "--xla_gpu_enable_command_buffer=-CUSTOM_CALL"
LEAST_RECORDED = "--xla_gpu_graph_min_graph_size=4"
ON_IMPORT = (NO_RECORDED_KERNELS, LEAST_RECORDED)
"""What `import stretto` adds."""
NO_SLICES_IN_CALLS = "--xla_gpu_enable_dynamic_slice_fusion=false"
"""What kernels need whose devices belong to several processes (`share_memory_of_kernels`)."""


def given(environ: Mapping[str, str]) -> str:
    """The flags of the user, without those that are set here."""
    own = (*ON_IMPORT, NO_SLICES_IN_CALLS)
    return " ".join(x for x in environ.get(VARIABLE, "").split() if x not in own)


def exclude_kernels_from_command_buffers(environ: MutableMapping[str, str]) -> None:
    """Has XLA launch kernels one by one, in place of recording them in a CUDA graph.

    What is recorded holds the addresses that peers' buffers had then, and XLA records again only
    when buffers of the same device move: a kernel would still read where a peer's operand used
    to be. Seen on 4 H100s with JAX 0.11.2. XLA reads its flags once, when JAX is first used, so
    `import stretto` does this; other flags are kept.
    """
    flags = environ.get(VARIABLE, "")
    if NO_RECORDED_KERNELS not in flags.split():
        environ[VARIABLE] = f"{flags} {NO_RECORDED_KERNELS}".strip()


def record_runs_of_four(environ: MutableMapping[str, str]) -> None:
    """Has XLA record four of its kernels in a row in a command buffer, in place of five or more.

    A kernel between them ends such a run. What XLA launches before and after one, to fill up
    operands and to cut out results, are often four with one that the caller has there.

    A flag that the user has set is left as it is.
    """
    _add(LEAST_RECORDED, environ)


def _add(flag: str, environ: MutableMapping[str, str]) -> None:
    """Adds a flag unless the environment has it, with any value."""
    if not _decides(flag, environ):
        environ[VARIABLE] = f"{environ.get(VARIABLE, '')} {flag}".strip()


def _decides(flag: str, environ: Mapping[str, str]) -> bool:
    name = flag.partition("=")[0]
    return any(own.partition("=")[0] == name for own in environ.get(VARIABLE, "").split())


def share_memory_of_kernels(environ: MutableMapping[str, str]) -> None:
    """Has XLA put all that kernels read and write into memory that processes share.

    A kernel between processes reaches a peer's memory by a window of NCCL, and XLA allocates such
    memory for a kernel's operands and results. But a slice that only a kernel reads, such as the
    weights of a layer in a scan, becomes part of the kernel's call. The array that it is a slice of
    is then no shared memory: NCCL refuses it where it begins at no page ("Window address must be
    suitably aligned"; XLA of JAX 0.11.2, seen on an H200).

    A flag that the user has set is left as it is.
    """
    _add(NO_SLICES_IN_CALLS, environ)


def decides_on_slices(environ: Mapping[str, str]) -> bool:
    """Whether the environment says whether slices become part of calls."""
    return _decides(NO_SLICES_IN_CALLS, environ)
