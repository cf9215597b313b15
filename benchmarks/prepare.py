"""Compiles the peers of a case into timers, and checks our kernels' results against XLA's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from stretto.benchmarks import floors, programs
from stretto.benchmarks.errors import UnavailableError
from stretto.benchmarks.machine import is_gpu
from stretto.benchmarks.operations import Case
from stretto.benchmarks.peers import FUSED, OTHER, Peer
from stretto.benchmarks.programs import Candidate, Operands
from stretto.benchmarks.timing import LoopTimer, agreed, calls_per_run

TOLERANCE = {"bfloat16": 2e-2, "float16": 2e-3, "float32": 2e-3, "float64": 1e-9}
"""Relative (Frobenius) difference from XLA's result beyond which a kernel is called wrong."""


@dataclasses.dataclass(frozen=True)
class Ready:
    """A candidate that can be timed."""

    candidate: Candidate
    timer: LoopTimer


class Bench:
    """One case on one mesh: its operands, and how its candidates become timers."""

    def __init__(self, case: Case, mesh: Mesh, seed: int):
        self.case = case
        self.mesh = mesh
        self.on_gpu = is_gpu(mesh.devices.flat[0].platform)
        self.operands = Operands(mesh, case.dtype, seed)
        self.sets = programs.number_of_sets(case.footprint) if self.on_gpu else 2
        self._reference: jax.Array | None = None

    def ready(self, candidate: Candidate) -> Ready:
        """Compiles `candidate`'s loop."""
        calls = calls_per_run(floors.expected_us(self.case), self.sets, self.on_gpu)
        sets = self.operands.sets(candidate, self.sets)
        program = programs.compiled(candidate, self.mesh, sets, calls // self.sets)
        flat = [operand for operands in sets for operand in operands]
        token = programs.first_token(self.mesh)
        return Ready(candidate, LoopTimer(program, token, flat, calls, queued=self.on_gpu))

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

    Pallas kernels compile on threads beside each other; XLA's programs in one thread, one after
    another, because XLA times matmuls on the device to choose an algorithm, and would choose badly
    if two did so at once. With several processes all compile in the same order, in one thread.
    """
    if jax.process_count() > 1:
        return {peer.name: _all_agree(bench, peer, out_of_time) for peer in peers}
    with ThreadPoolExecutor(8) as pallas, ThreadPoolExecutor(1) as xla:

        def submit(peer: Peer) -> list[Future[Ready]] | Exception:
            try:
                if out_of_time():
                    raise UnavailableError("the time limit had passed")
                candidates = _candidates(bench, peer)
            except Exception as error:
                return error
            pool = pallas if peer.role in (FUSED, OTHER) and peer.name != "xla-windowed" else xla
            return [pool.submit(bench.ready, candidate) for candidate in candidates]

        pending = {peer.name: submit(peer) for peer in peers}
        return {
            name: futures if isinstance(futures, Exception) else _gather(futures)
            for name, futures in pending.items()
        }


def _candidates(bench: Bench, peer: Peer) -> list[Candidate]:
    if peer.candidates is None:
        raise UnavailableError("it runs in a helper process")
    candidates = peer.candidates(bench.case, bench.mesh)
    for candidate in candidates:
        bench.operands.sets(candidate, bench.sets)
    return candidates


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
    try:
        if out_of_time():
            raise UnavailableError("the time limit had passed")
        candidates = _candidates(bench, peer)
    except Exception as error:
        candidates, failure = [], error
    else:
        failure = None
    if agreed(failure is not None):
        return failure or UnavailableError("it failed on another process")
    done: list[Ready] = []
    for candidate in candidates:
        ready = None
        try:
            ready = bench.ready(candidate)
        except Exception as error:
            failure = error
        if not agreed(ready is None) and ready is not None:
            done.append(ready)
    return done or failure or UnavailableError("it failed on another process")
