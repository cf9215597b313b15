"""Programs that XLA records in command buffers (CUDA graphs), with their kernels.

What is recorded is launched together, and not one kernel after the other by the host. XLA decides by
kind of command, for a program: all custom calls or none. Kernels that read their peers' operands must
not be recorded (`xla_flags`); kernels that exchange through the heap may (`posting`).
"""  # noqa: E501

from __future__ import annotations

import contextlib
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

# Part of the key of JAX's caches: a function that is jitted by itself is traced anew inside.
_active = jax.make_user_context(default_value=False)


def is_active() -> bool:
    """Whether what is being traced or lowered belongs to a recorded program."""
    return _active.value


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """What is traced and lowered inside it belongs to a recorded program."""
    with _active(True):
        yield


def recorded(fun: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`jax.jit(fun, **options)` as a program that XLA records with its kernels in command buffers.

    For programs of many short kernels, such as a step of a decoder. Small collectives then exchange
    through the heap where that was measured to be faster; XLA serves the other operations of several
    devices, also those that a kernel serves elsewhere. Donate what a step replaces
    (`donate_argnums`): where an operand or a result has moved since the call before, XLA writes
    its address into the recording again, which took 3 to 4 us a kernel on an H200.

    The result has `jax.jit`'s `lower`, for `recorded(fun).lower(*args).compile()`.

    Args:
      fun: as for `jax.jit`.
      **options: of `jax.jit`; `compiler_options` are added to those that record.

    Raises:
      TypeError: `fun` is no function.
      NotImplementedError: at its first call, where a kernel in it reads its peers' operands.
    """  # noqa: E501
    if not callable(fun):
        raise TypeError(f"recorded: fun={fun!r:.60} is of type {type(fun).__name__}, no function.")
    given = options.pop("compiler_options", None) or {}

    @functools.cache
    def jitted() -> Callable[..., Any]:  # At the first call: it takes a look at the devices.
        on_gpus = jax.default_backend() == "gpu"
        mixed = {**OPTIONS, **given} if on_gpus else given
        return jax.jit(fun, compiler_options=mixed or None, **options)

    @functools.wraps(fun)
    def call(*args: Any, **kwargs: Any) -> Any:
        with recording():
            return jitted()(*args, **kwargs)

    def lower(*args: Any, **kwargs: Any) -> Any:
        with recording():
            return jitted().lower(*args, **kwargs)

    call.lower = lower  # type: ignore[attr-defined]
    return call
