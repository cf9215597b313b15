"""Compiles the programs of many cases in processes of their own, before they are timed here.

Tracing and lowering a kernel take as long as compiling it and hold Python's lock, so threads do not
help. The processes write what they have compiled into a folder (`stored`), from where the process
that measures loads it. What is there already is not compiled again. XLA's own programs are not
compiled so: XLA times variants of them on the device, which it does in the process that measures.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.resources
import multiprocessing
import os
import pathlib
import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any

import jax
import msgspec

from stretto.benchmarks import files
from stretto.benchmarks.cases.candidate import Candidate
from stretto.benchmarks.cases.case import Case
from stretto.benchmarks.cases.meshes import mesh_of
from stretto.benchmarks.cases.shapes import operation_named
from stretto.benchmarks.errors import first_line
from stretto.benchmarks.measurements.machine import describe, is_gpu
from stretto.benchmarks.peers.peer import Peer, applies
from stretto.benchmarks.timing import stored
from stretto.benchmarks.timing.compiling import Compiler
from stretto.benchmarks.timing.lowering import Lowering, Program
from stretto.benchmarks.timing.operands import Operands
from stretto.benchmarks.timing.stored import Stored
from stretto.launch import environment


@dataclasses.dataclass(frozen=True)
class Seconds:
    """What compiling took, over all programs."""

    traced: float = 0.0
    lowered: float = 0.0
    compiled: float = 0.0

    def __add__(self, other: Seconds) -> Seconds:
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Seconds(*(ours + theirs for ours, theirs in pairs))


type Programs = Mapping[str, list[Stored | None]]
"""A case's, by the names of peers."""


class Ahead:
    """Processes that compile for this one; `with` it, all have ended at the end.

    Args:
      peers: returns those whose kernels are compiled; a function that can be pickled.
      count: of processes. Each has a context on each GPU, of half a gigabyte.
      folder: where programs are kept; others of the same name are of other versions or options.
      run_us: as in `measure.Settings`.
      kind: words that programs depend on besides the case, such as a seed.
    """

    def __init__(
        self,
        peers: Callable[[], list[Peer]],
        count: int,
        folder: pathlib.Path,
        run_us: float,
        kind: str = "",
    ):
        machine = msgspec.structs.replace(describe(), commit="")  # The source itself counts.
        self._work = _Work(peers, folder / _digest(machine, _source(), run_us, kind), run_us)
        self._pool = ProcessPoolExecutor(
            count,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_start,
            initargs=(jax.device_count(),),
        )
        self._addresses = stored.addresses()
        self._begun: dict[tuple, Future[tuple[Programs, tuple[int, int], Seconds]]] = {}
        self._count = count
        self._seconds = Seconds()

    def __enter__(self) -> Ahead:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the processes, and so frees their memory on the GPUs."""
        self._pool.shutdown(cancel_futures=True)

    def begin(self, cases: Sequence[Case]) -> None:
        """Has the processes compile these cases, in order."""
        for case in cases:
            words = (case.operation.name, dict(case.sizes), case.dtype, case.devices, case.values)
            self._begun[case.key] = self._pool.submit(_compile, self._work, words)

    def wait(self, case: Case) -> Programs:
        """The programs of a case that was begun; none if they would not run in this process."""
        found, addresses, seconds = self._begun.pop(case.key).result()
        self._seconds += seconds
        return found if addresses == self._addresses else {}

    def said(self) -> str:
        """What the processes took, in words."""
        took = self._seconds
        return (
            f"{self._count} processes took {took.traced:.0f} s to trace, {took.lowered:.0f} s to"
            f" lower and {took.compiled:.0f} s to wait for the compiler, together"
        )


@dataclasses.dataclass(frozen=True)
class _Work:
    peers: Callable[[], list[Peer]]
    folder: pathlib.Path
    run_us: float


def _start(devices: int) -> None:
    """The first thing that a process does, before it uses JAX."""
    environment.leave_gpu_memory()
    with contextlib.suppress(RuntimeError):  # as where a user has set it
        jax.config.update("jax_num_cpu_devices", devices)


def _compile(
    work: _Work, words: tuple[str, dict[str, int], str, int, str]
) -> tuple[Programs, tuple[int, int], Seconds]:
    """Compiles what the folder lacks of a case; in a process of its own.

    Returns its programs, the addresses in them, and what they took.
    """
    name, sizes, dtype, devices, values = words
    case = Case(
        operation=operation_named(name), sizes=sizes, dtype=dtype, devices=devices, values=values
    )
    index = work.folder / f"{_digest(words)}.case"
    with contextlib.suppress(OSError):
        return *pickle.loads(index.read_bytes()), Seconds()
    builder = _Builder(case, work)
    peers = [peer for peer in work.peers() if applies(peer, case)]
    found = {peer.name: list(builder.programs(peer)) for peer in peers}
    files.write_whole(index, pickle.dumps((found, stored.addresses())))
    return found, stored.addresses(), builder.seconds


class _Builder:
    """Compiles the candidates of a case."""

    def __init__(self, case: Case, work: _Work):
        self._case, self._folder = case, work.folder
        self._mesh = mesh_of(case.devices)
        self._on_gpu = is_gpu(self._mesh.devices.flat[0].platform)
        self._lowering = Lowering(case, self._mesh, work.run_us)
        self._operands = Operands(self._mesh, case.dtype, Compiler())
        self._compiled_s = 0.0

    @property
    def seconds(self) -> Seconds:
        return Seconds(self._lowering.traced_s, self._lowering.lowered_s, self._compiled_s)

    def programs(self, peer: Peer) -> Iterator[Stored | None]:
        """The program of each of a peer's candidates; None where it is XLA's own, of a GPU."""
        try:
            candidates = peer.candidates_for(self._case, self._mesh)
        except Exception:  # The process that measures comes to the same error, and records it.
            return
        with Compiler() as compiler:
            begun = [self._begin(candidate, compiler) for candidate in candidates]
            began = time.monotonic()
            for one in begun:
                yield self._finished(*one) if isinstance(one, tuple) else one
            self._compiled_s += time.monotonic() - began

    def _begin(
        self, candidate: Candidate, compiler: Compiler
    ) -> tuple[Program, Future[Any]] | Stored | None:
        try:
            program = self._lowering(candidate, self._operands.describe(candidate))
        except Exception as error:
            return Stored(error=first_line(error))
        if program.backend == "xla" and self._on_gpu:
            return None
        options = candidate.compiler_options
        return program, compiler.submit(program.lowered, options, text=program.text)

    def _finished(self, program: Program, compiled: Future[Any]) -> Stored:
        path = self._folder / f"{_digest(program.text)}.program"
        out = jax.tree.map(lambda one: jax.ShapeDtypeStruct(one.shape, one.dtype), program.out)
        try:
            if not path.exists():
                stored.save(compiled.result(), path)
        except Exception as error:
            return Stored(error=first_line(error))
        return Stored(program=path, backend=program.backend, config=program.config, out=out)


def _digest(*words: object) -> str:
    return hashlib.sha256(repr(words).encode()).hexdigest()[:16]


def _source() -> str:
    """A digest of Stretto's source and tables, on which its programs depend."""
    root = pathlib.Path(str(importlib.resources.files("stretto")))
    found = hashlib.sha256()
    for folder, _, names in sorted(os.walk(root, followlinks=True)):
        for name in sorted(names):
            if name.endswith((".py", ".toml")):
                found.update((pathlib.Path(folder) / name).read_bytes())
    return found.hexdigest()
