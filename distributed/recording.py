"""Programs that XLA records in command buffers (CUDA graphs), with their kernels.

What is recorded is launched without the host, one kernel 2 microseconds after the other. XLA decides
by kind of command, for a program: all custom calls or none. Kernels that read their peers' operands
must not be recorded (`xla_flags`); kernels that exchange through the heap may (`posting`).
"""  # noqa: E501

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax

OPTIONS: dict[str, Any] = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL",
    "xla_gpu_graph_min_graph_size": 1,
    "xla_gpu_command_buffer_scheduling_mode": "LHS",
}
"""XLA's options for such a program: the kinds of commands, in place of those that it records by
default; how many there must be in a row; and that they keep their order, as two kernels must that
exchange through the heap. The body of a loop is recorded and not the loop: an empty kernel took 7.9
microseconds in a recorded body on an H200, and 12.4 in a recorded loop."""

_active: contextvars.ContextVar[bool] = contextvars.ContextVar("recording", default=False)


def is_active() -> bool:
    """Whether what is being traced or lowered belongs to a recorded program."""
    return _active.get()


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """What is traced and lowered inside it belongs to a recorded program."""
    token = _active.set(True)
    try:
        yield
    finally:
        _active.reset(token)


def recorded(fun: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`jax.jit(fun, **options)` as a program that XLA records with its kernels in command buffers.

    For programs of many short kernels, such as a step of a decoder. Small collectives then exchange
    through the heap where that was measured to be faster; XLA serves the other operations of several
    devices, also those that a kernel serves elsewhere.

    Args:
      fun: as for `jax.jit`.
      **options: of `jax.jit`; `compiler_options` are added to those that record.

    Raises:
      NotImplementedError: at its first call, where a kernel in it reads its peers' operands.
    """  # noqa: E501
    mixed = {**OPTIONS, **options.pop("compiler_options", {})}
    on_gpus = jax.default_backend() == "gpu"
    compiled = jax.jit(fun, compiler_options=mixed if on_gpus else None, **options)

    @functools.wraps(fun)
    def call(*args: Any, **kwargs: Any) -> Any:
        with recording():
            return compiled(*args, **kwargs)

    return call
