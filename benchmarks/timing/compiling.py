"""Compiles programs on many threads at once, each of them once.

Compiling for a GPU takes a second or more a program, nearly all of it outside Python, so the
programs of many cases are compiled beside each other before any of them is timed. While XLA
compiles it may time variants of a matmul on the device to choose one; it takes the device for
itself then, so that two such choices do not disturb each other. Nothing must be timed meanwhile:
`wait` first.
"""

from __future__ import annotations

import os
import pathlib
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
from jax.sharding import Mesh

from stretto.benchmarks.timing import stored

MOST_THREADS = 32
MOST_XLA_THREADS = 8
"""Fewer where XLA times variants: each holds operands of its own on the device."""


class Compiler:
    """A pool of threads that compile; `with` it, all of them have ended at the end.

    In a job of several processes every process must compile the same programs in the same order
    (XLA exchanges its choices between them), so each is compiled at once by who submits it.
    """

    def __init__(self) -> None:
        cores = os.cpu_count() or 1
        self._inline = jax.process_count() > 1
        self._pool = ThreadPoolExecutor(min(MOST_THREADS, cores))
        self._xla_pool = ThreadPoolExecutor(min(MOST_XLA_THREADS, cores))
        self._lock = threading.Lock()
        self._made: dict[tuple[str, str], Future[Any]] = {}

    def __enter__(self) -> Compiler:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._xla_pool.shutdown(cancel_futures=True)

    def submit(
        self,
        program: jax.stages.Lowered,
        options: Mapping[str, Any] | None = None,
        *,
        by_xla: bool = False,
        text: str | None = None,
    ) -> Future[Any]:
        """The program, compiled; the same future for the same program.

        Args:
          program: a lowered function.
          options: XLA's flags for this program only.
          by_xla: whether XLA may time variants of it on the device.
          text: the program's text, where the caller has it already.
        """
        chosen = dict(options or {})
        key = (program.as_text() if text is None else text, str(sorted(chosen.items())))

        def compile_it() -> Any:
            return program.compile(compiler_options=chosen or None)

        with self._lock:
            if key not in self._made:
                self._made[key] = self._start(compile_it, by_xla)
            return self._made[key]

    def load(self, path: pathlib.Path, mesh: Mesh) -> Future[Any]:
        """A program that another process has compiled for devices of `mesh`, from its file."""
        with self._lock:
            if (key := (str(path), "")) not in self._made:
                self._made[key] = self._start(lambda: stored.load(path, mesh), by_xla=False)
            return self._made[key]

    def _start(self, compile_it: Any, by_xla: bool) -> Future[Any]:
        if not self._inline:
            return (self._xla_pool if by_xla else self._pool).submit(compile_it)
        future: Future[Any] = Future()
        try:
            future.set_result(compile_it())
        except Exception as error:
            future.set_exception(error)
        return future

    def wait(self) -> None:
        """Returns when all that was submitted is compiled, or has failed."""
        for future in list(self._made.values()):
            future.exception()
