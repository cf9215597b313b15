"""Prepares the peers of a case: traces their programs, and makes timers of what was compiled."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from stretto.benchmarks.cases.candidate import Candidate
from stretto.benchmarks.cases.case import Case
from stretto.benchmarks.cases.meshes import joined
from stretto.benchmarks.errors import UnavailableError
from stretto.benchmarks.measurements.machine import is_gpu
from stretto.benchmarks.peers.peer import Peer
from stretto.benchmarks.peers.peers import PEERS
from stretto.benchmarks.timing import beside_float32, programs
from stretto.benchmarks.timing.compiling import Compiler
from stretto.benchmarks.timing.lowering import Lowering
from stretto.benchmarks.timing.operands import Operands
from stretto.benchmarks.timing.stored import Stored
from stretto.benchmarks.timing.timers import TARGET_RUN_US, LoopTimer, agreed

TOLERANCE = {"bfloat16": 2e-2, "float16": 2e-3, "float32": 2e-3, "float64": 1e-9}
"""Relative (Frobenius) difference from XLA's result beyond which a kernel is called wrong."""


@dataclasses.dataclass(frozen=True)
class Ready:
    """A candidate that can be timed.

    `backend` is what serves it, "pallas" or "xla"; `config` the configuration, in words or, of a
    kernel of Stretto, its fields as JSON.
    """

    candidate: Candidate
    timer: LoopTimer
    backend: str
    config: str


@dataclasses.dataclass(frozen=True)
class _Lowered:
    """A candidate's program on its way through the compiler."""

    candidate: Candidate
    compiled: Future[Any]
    backend: str
    config: str
    out: Any


type Found = list[Ready] | Exception
type Ahead = Mapping[str, Sequence[Stored | None]]
"""What other processes have compiled of a case: for a peer's name, each candidate's program, or
None for one that is compiled here."""


class Bench:
    """One case on one mesh: its operands, and how its candidates become timers.

    Nothing is allocated on the devices before `ready` is called.

    Args:
      case, mesh: what is timed, and where.
      seed: of the operands.
      compiler: compiles the programs.
      run_us: microseconds that a run of a program is to take.
      ahead: what other processes have compiled already.
    """

    def __init__(
        self,
        case: Case,
        mesh: Mesh,
        seed: int,
        compiler: Compiler,
        run_us: float = TARGET_RUN_US,
        ahead: Ahead | None = None,
    ):
        self.case = case
        self.mesh = mesh
        self.on_gpu = is_gpu(mesh.devices.flat[0].platform)
        self._lowering = Lowering(case, mesh, run_us)
        self.sets, self.rounds = self._lowering.sets, self._lowering.rounds
        self._ahead = ahead or {}
        self._compiler = compiler
        self._operands = Operands(mesh, case.dtype, compiler, seed)
        self._pending: dict[str, list[_Lowered | Exception] | Exception] = {}
        self._error_program: Future[Any] | None = None
        self._float32_program: Future[Any] | None = None
        self._reference: Any = None

    def begin(self, peers: Sequence[Peer], out_of_time: Callable[[], bool], check: bool) -> None:
        """Traces the peers' candidates and begins to compile them.

        Args:
          peers: those that run in this process; results are held to that of the one called "xla",
            the bench's own unless it is among them.
          out_of_time: once it says so, the rest are left out.
          check: whether `error_of` will be called.
        """
        for peer in peers:
            try:
                if out_of_time():
                    raise UnavailableError("the time limit had passed")
                self._pending[peer.name] = self._lower_all(peer)
            except Exception as error:
                self._pending[peer.name] = error
        if check:
            if "xla" not in self._pending:
                self._pending["xla"] = self._lower_all(PEERS["xla"])
            reference = self._pending["xla"]
            if not isinstance(reference, Exception) and isinstance(reference[0], _Lowered):
                defined = self.case.operation.examples.defined
                error = programs.error_program(self.mesh, reference[0].out, defined)
                self._error_program = self._compiler.submit(error)
                if beside_float32.serves(self.case):
                    self._float32_program = self._beside_float32(reference[0])

    def _beside_float32(self, reference: _Lowered) -> Future[Any]:
        described = self._operands.describe(reference.candidate)
        program = beside_float32.error_program(self.case, self.mesh, reference.out, described)
        # Of a product that is not timed no variants need be.
        options = {"xla_gpu_autotune_level": 0} if self.on_gpu else None
        return self._compiler.submit(program, options)

    def _lower_all(self, peer: Peer) -> list[_Lowered | Exception]:
        candidates = peer.candidates_for(self.case, self.mesh)
        if not candidates:
            raise UnavailableError("it offers no configuration")
        ahead = self._ahead.get(peer.name) or [None] * len(candidates)
        found: list[_Lowered | Exception] = []
        for candidate, stored in zip(candidates, ahead, strict=True):
            try:
                if stored is None:
                    found.append(self._lower(candidate, peer.by_xla))
                else:
                    found.append(self._load(candidate, stored))
            except Exception as error:
                found.append(error)
        return found

    def _lower(self, candidate: Candidate, by_xla: bool) -> _Lowered:
        self._operands.prepare(candidate)
        program = self._lowering(candidate, self._operands.describe(candidate))
        compiled = self._compiler.submit(
            program.lowered, candidate.compiler_options, by_xla=by_xla, text=program.text
        )
        return _Lowered(
            candidate=candidate,
            compiled=compiled,
            backend=program.backend,
            config=program.config,
            out=self._as_sharded(program.out),
        )

    def _load(self, candidate: Candidate, stored: Stored) -> _Lowered:
        """A candidate that another process has compiled, on its way into this one."""
        if stored.error:
            raise UnavailableError(stored.error)
        self._operands.prepare(candidate)
        return _Lowered(
            candidate=candidate,
            compiled=self._compiler.load(stored.program, self.mesh),
            backend=stored.backend,
            config=stored.config,
            out=self._as_sharded(stored.out),
        )

    def _as_sharded(self, out: Any) -> Any:
        """A tree of results' shapes and types, on all devices."""
        sharding = NamedSharding(self.mesh, joined(self.mesh))
        return jax.tree.map(
            lambda one: jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=sharding), out
        )

    def ready(self, name: str) -> Found:
        """The compiled candidates of a peer, or the exception that says why there are none.

        Every process must call it, and all get the same candidates.
        """
        pending = self._pending[name]
        if agreed(isinstance(pending, Exception)) or isinstance(pending, Exception):
            other = UnavailableError("it failed on another process")
            return pending if isinstance(pending, Exception) else other
        done: list[Ready] = []
        failure: Exception = UnavailableError("it failed on another process")
        for one in pending:
            made: Ready | None = None
            try:
                made = self._timer(one)
            except Exception as error:
                failure = error
            if not agreed(made is None) and made is not None:
                done.append(made)
        return done or failure

    def _timer(self, one: _Lowered | Exception) -> Ready:
        if isinstance(one, Exception):
            raise one
        sets = self._operands.sets(one.candidate, self.sets)
        flat = [operand for operands in sets for operand in operands]
        timer = LoopTimer(
            one.compiled.result(),
            programs.first_token(self.mesh),
            flat,
            calls=self.rounds * self.sets + 1,
            queued=self.on_gpu,
        )
        return Ready(one.candidate, timer, one.backend, one.config)

    def error_of(self, ready: Ready) -> float:
        """Relative difference of the candidate's result from that of XLA's unfused operation."""
        if self._error_program is None:
            raise UnavailableError("there is no result of XLA's to compare with")
        if self._reference is None:
            found = self.ready("xla")
            if isinstance(found, Exception):
                raise UnavailableError(f"XLA's result to compare with: {found}") from found
            self._reference = found[0].timer.result()
        error = self._error_program.result()(ready.timer.result(), self._reference)
        return float(error.addressable_data(0))

    def float32_error_of(self, ready: Ready) -> float | None:
        """Relative difference from the product in float32; None where no such product is made."""
        if self._float32_program is None:
            return None
        (operands,) = self._operands.sets(ready.candidate, 1)
        error = self._float32_program.result()(ready.timer.result(), *operands)
        return float(error.addressable_data(0))

    def check(self, ready: Ready) -> float:
        """`error_of`; UnavailableError if it is beyond the type's tolerance."""
        error = self.error_of(ready)
        allowed = TOLERANCE.get(jnp.dtype(self.case.dtype).name, 0.0)
        if not error <= allowed:
            raise UnavailableError(
                f"its result is wrong: relative error {error:.2g} against XLA's, allowed {allowed}"
            )
        return error
