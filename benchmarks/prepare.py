"""Compiles the peers of a case into timers, and checks our kernels' results against XLA's."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from stretto.benchmarks import floors, programs
from stretto.benchmarks.errors import UnavailableError
from stretto.benchmarks.machine import is_gpu
from stretto.benchmarks.operations import Case
from stretto.benchmarks.peers import Peer
from stretto.benchmarks.programs import Candidate, Operands
from stretto.benchmarks.timing import LoopTimer, agreed, calls_per_run

TOLERANCE = {"bfloat16": 2e-2, "float16": 2e-3, "float32": 2e-3, "float64": 1e-9}
"""Relative (Frobenius) difference from XLA's result beyond which a kernel is called wrong."""


@dataclasses.dataclass(frozen=True)
class Ready:
    """A candidate that can be timed; `backend` is what serves it, "pallas" or "xla"."""

    candidate: Candidate
    timer: LoopTimer
    backend: str


class _Once:
    """What was made for a key, made by the first thread that asks; the others wait for it.

    `auto` is always the same program as another peer.
    """

    def __init__(self):
        self._lock = threading.Lock()
        self._made: dict[Hashable, Future[Any]] = {}

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What `make` returned for `key`, or the exception that it raised."""
        with self._lock:
            is_first = key not in self._made
            future = self._made.setdefault(key, Future())
        if is_first:
            try:
                future.set_result(make())
            except Exception as error:
                future.set_exception(error)
        return future.result()


class Bench:
    """One case on one mesh: its operands, and how its candidates become timers."""

    def __init__(self, case: Case, mesh: Mesh, seed: int):
        self.case = case
        self.mesh = mesh
        self.on_gpu = is_gpu(mesh.devices.flat[0].platform)
        self.operands = Operands(mesh, case.dtype, seed)
        self.sets = programs.number_of_sets(case.footprint) if self.on_gpu else 2
        self._reference: jax.Array | None = None
        self._compiled = _Once()

    def lower(self, candidate: Candidate) -> Callable[[], Ready]:
        """Traces `candidate`'s loop; what it returns compiles it, on any thread."""
        calls = calls_per_run(floors.expected_us(self.case), self.sets, self.on_gpu)
        sets = self.operands.sets(candidate, self.sets)
        program = programs.lowered(candidate, self.mesh, sets, calls // self.sets)
        text = program.as_text()
        backend = "pallas" if "mosaic_gpu" in text else "xla"
        key = (text, str(candidate.compiler_options))
        flat = [operand for operands in sets for operand in operands]
        token = programs.first_token(self.mesh)

        def compile_it() -> Ready:
            run = self._compiled.get(key, lambda: programs.compiled(candidate, program))
            timer = LoopTimer(run, token, flat, calls, queued=self.on_gpu)
            return Ready(candidate, timer, backend)

        return compile_it

    def error_of(self, candidate: Candidate) -> float:
        """Relative difference of the candidate's result from that of XLA's unfused operation."""
        if self._reference is None:
            unfused = Candidate(body=self.case.operation.unfused, blocks=self.case.blocks)
            self._reference = self._result(unfused)
        return programs.relative_error(self._result(candidate), self._reference, self.mesh)

    def check(self, candidate: Candidate) -> float:
        """`error_of`; UnavailableError if it is beyond the type's tolerance."""
        error = self.error_of(candidate)
        allowed = TOLERANCE.get(jnp.dtype(self.case.dtype).name, 0.0)
        if not error <= allowed:
            raise UnavailableError(
                f"its result is wrong: relative error {error:.2g} against XLA's, allowed {allowed}"
            )
        return error

    def _result(self, candidate: Candidate) -> jax.Array:
        return programs.run_once(candidate, self.mesh, self.operands.sets(candidate, 1)[0])


def compile_all(
    bench: Bench, peers: list[Peer], out_of_time: Callable[[], bool]
) -> dict[str, list[Ready] | Exception]:
    """By peer, its compiled candidates, or the exception that says why there are none.

    Tracing is done here. Pallas kernels then compile on threads beside each other; XLA's programs
    in one thread, one after another, because XLA times matmuls on the device to choose an
    algorithm, and would choose badly if two did so at once. With several processes all compile in
    the same order, in one thread.
    """
    if jax.process_count() > 1:
        return {peer.name: _all_agree(bench, peer, out_of_time) for peer in peers}
    with ThreadPoolExecutor(8) as pallas, ThreadPoolExecutor(1) as xla:
        pending: dict[str, list[Future[Ready]] | Exception] = {}
        for peer in peers:
            pool = xla if peer.by_xla else pallas
            try:
                pending[peer.name] = [pool.submit(job) for job in _jobs(bench, peer, out_of_time)]
            except Exception as error:
                pending[peer.name] = error
        return {
            name: futures if isinstance(futures, Exception) else _gather(futures)
            for name, futures in pending.items()
        }


def _jobs(bench: Bench, peer: Peer, out_of_time: Callable[[], bool]) -> list[Callable[[], Ready]]:
    """The peer's candidates that can be traced; the first error if none can."""
    if out_of_time():
        raise UnavailableError("the time limit had passed")
    if peer.candidates is None:
        raise UnavailableError("it runs in a helper process")
    jobs: list[Callable[[], Ready]] = []
    failed: list[Exception] = []
    for candidate in peer.candidates(bench.case, bench.mesh):
        try:
            jobs.append(bench.lower(candidate))
        except Exception as error:
            failed.append(error)
    if not jobs:
        raise failed[0] if failed else UnavailableError("it offers no configuration")
    return jobs


def _gather(futures: list[Future[Ready]]) -> list[Ready] | Exception:
    """Those that compiled; the first error if none did."""
    done, failed = [], []
    for future in futures:
        try:
            done.append(future.result())
        except Exception as error:
            failed.append(error)
    return done or failed[0]


def _all_agree(
    bench: Bench, peer: Peer, out_of_time: Callable[[], bool]
) -> list[Ready] | Exception:
    """One process's part of compiling `peer` where every process must end with the same."""
    jobs: list[Callable[[], Ready]] = []
    failure: Exception = UnavailableError("it failed on another process")
    try:
        jobs = _jobs(bench, peer, out_of_time)
    except Exception as error:
        failure = error
    if agreed(not jobs):
        return failure
    done: list[Ready] = []
    for job in jobs:
        ready = None
        try:
            ready = job()
        except Exception as error:
            failure = error
        if not agreed(ready is None) and ready is not None:
            done.append(ready)
    return done or failure
