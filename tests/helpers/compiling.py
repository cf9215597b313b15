"""Compiling many programs beside each other: on GPUs, most of a test's time is the compiler's."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

import jax
import numpy as np

THREADS = 16
# XLA's own matmuls need not be fast here. Trying variants of each on the device costs seconds.
QUICKLY = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}

type Program = Callable[..., Any]


def compile_one(function: Callable, *arguments: Any) -> Program:
    """`jax.jit(function)`, compiled for `arguments`."""
    return jax.jit(function).lower(*arguments).compile(compiler_options=_options())


def side_by_side[Label: Hashable](
    programs: Iterable[tuple[Label, Callable, tuple]], threads: int = THREADS
) -> Iterator[tuple[Label, Program | Exception]]:
    """Compiles (label, function, arguments), and yields (label, program or why there is none).

    In the order given; tracing is done here, compiling on threads. A program that cannot be
    compiled does not keep the others from being checked.
    """
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        pending: list[tuple[Label, concurrent.futures.Future | Exception]] = []
        for label, function, arguments in programs:
            try:
                lowered = jax.jit(function).lower(*arguments)
            except Exception as error:
                pending.append((label, error))
            else:
                pending.append((label, pool.submit(lowered.compile, compiler_options=_options())))
        for label, future in pending:
            if isinstance(future, Exception):
                yield label, future
            else:
                error = future.exception()
                yield label, future.result() if error is None else _as_exception(error)


def run(program: Program, *scalars: int | bool) -> Any:
    """What a program of `subjects.on_mesh` returns for these arguments, on the host."""
    return jax.tree.map(np.asarray, program(*map(scalar, scalars)))


def scalar(value: int | bool) -> np.ndarray:
    """An argument that every process gives alike."""
    return np.asarray(value, np.bool_ if isinstance(value, bool) else np.int32)


def first_line(error: BaseException) -> str:
    """An error's type and the first line that says something, at most 300 characters."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:300]


def _options() -> dict[str, Any] | None:
    return QUICKLY if jax.default_backend() == "gpu" else None


def _as_exception(error: BaseException) -> Exception:
    if isinstance(error, Exception):
        return error
    raise error
