"""Times every peer of one case."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import jax
import numpy as np
from jax.sharding import Mesh

from stretto.benchmarks.cases.case import Case
from stretto.benchmarks.cases.meshes import mesh_of
from stretto.benchmarks.errors import DeviceLostError, UnavailableError, first_line
from stretto.benchmarks.measurements import figures
from stretto.benchmarks.measurements.results import Measurement, Missing, Timed
from stretto.benchmarks.measurements.spread import spread
from stretto.benchmarks.peers.peer import FUSED, XLA, Peer, applies
from stretto.benchmarks.timing import clocks, memory
from stretto.benchmarks.timing.clocks import Clock, Clocks
from stretto.benchmarks.timing.compiling import Compiler
from stretto.benchmarks.timing.prepare import Ahead, Bench, Ready
from stretto.benchmarks.timing.timers import SAMPLES_PER_VISIT, TARGET_RUN_US, Timer, agreed
from stretto.benchmarks.timing.turns import in_turns


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """How each case is timed.

    `repeats` samples per peer, in visits of `SAMPLES_PER_VISIT` with `rest_s` seconds of idle
    between, each of a run of about `run_us`; `check` compares Stretto's results with XLA's first.
    `enough` is asked after each round: (samples of each peer, samples of a visit) -> whether the
    case needs no more.
    """

    repeats: int = 20
    rest_s: float = 0.005
    seed: int = 0
    check: bool = True
    link_gb_per_s: float = 350.0
    enough: Callable[[Mapping[str, Sequence[float]], int], bool] | None = None
    run_us: float = TARGET_RUN_US


class Helper(Protocol):
    """The process that times PyTorch's peers."""

    def timer(self, peer: str, case: Case, sets: int, rounds: int) -> Timer:
        """A timer of `peer`, a run of which goes `rounds` times through `sets` of operands.

        Raises:
          UnavailableError: there is none.
        """
        ...


@dataclasses.dataclass
class _Entry:
    peer: Peer
    config: str = ""
    backend: str = ""
    error: float | None = None
    float32_error: float | None = None
    looks: dict[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class _Program:
    """One program, its samples, the clocks after each visit, and the peers whose program it is."""

    timer: Timer
    entries: list[_Entry]
    samples: list[float] = dataclasses.field(default_factory=list)
    clocks: list[Clock] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepared:
    """A case whose programs are being compiled, or the reason why it is left out."""

    case: Case
    peers: list[Peer]
    bench: Bench | None
    skipped: str = ""


def prepare(
    case: Case,
    peers: Sequence[Peer],
    settings: Settings,
    compiler: Compiler,
    out_of_time: Callable[[], bool],
    mesh: Mesh | None = None,
    ahead: Ahead | None = None,
) -> Prepared:
    """Traces the programs of `case` and begins to compile them; allocates nothing.

    On `mesh`, by default the first devices on one axis; all but what is `ahead`, compiled by
    others. A case that cannot be cut into shares or
    does not fit in memory is marked as skipped.
    """
    mesh = mesh_of(case.devices) if mesh is None else mesh
    peers = [peer for peer in peers if applies(peer, case)]
    try:
        case.check()
        memory.check_fits(case, mesh)
    except UnavailableError as reason:
        return Prepared(case=case, peers=peers, bench=None, skipped=str(reason))
    bench = Bench(case, mesh, settings.seed, compiler, settings.run_us, ahead)
    check = settings.check and any(peer.is_checked for peer in peers)
    bench.begin([peer for peer in peers if peer.candidates is not None], out_of_time, check)
    return Prepared(case=case, peers=peers, bench=bench)


def take(
    prepared: Prepared,
    settings: Settings,
    helper: Helper | None,
    say: Callable[[str], None] = lambda _: None,
) -> Measurement:
    """The times of a prepared case's peers; the compiler must have ended.

    A peer that cannot serve the case or fails is recorded with its reason, and so is a case that
    was skipped.

    Raises:
      DeviceLostError: a peer left the devices unusable.
    """
    case, bench = prepared.case, prepared.bench
    if bench is None:
        skipped = figures.begin(case, 0)
        skipped.skipped = prepared.skipped
        return skipped
    measurement = figures.begin(case, bench.sets, SAMPLES_PER_VISIT)
    programs = _enter(bench, prepared.peers, settings, helper, measurement, say)
    _take_turns(programs, settings, measurement, bench, say)
    timed = {
        entry.peer.name: _timed(entry, p) for p in programs if p.samples for entry in p.entries
    }
    measurement.timed += [timed[peer.name] for peer in prepared.peers if peer.name in timed]
    figures.complete(measurement, case, settings.link_gb_per_s)
    return measurement


def measure(
    case: Case,
    peers: Sequence[Peer],
    settings: Settings,
    helper: Helper | None,
    mesh: Mesh | None = None,
) -> Measurement:
    """`prepare` and `take` of a single case."""
    with Compiler() as compiler:
        prepared = prepare(case, peers, settings, compiler, lambda: False, mesh)
        compiler.wait()
        return take(prepared, settings, helper)


def _enter(
    bench: Bench,
    peers: list[Peer],
    settings: Settings,
    helper: Helper | None,
    measurement: Measurement,
    say: Callable[[str], None],
) -> list[_Program]:
    """What can be timed, the other peers recorded as missing.

    Peers that turn out to be the same program (`auto`, always) are timed as one.
    """
    found: dict[int, _Program] = {}
    for peer in peers:
        say(f"preparing {peer.label}")
        try:
            if peer.candidates is None:
                if not peer.has(bench.case.operation):
                    raise UnavailableError(f"{peer.label} has no such operation")
                if helper is None:
                    raise UnavailableError("PyTorch's helper process is not used in this run")
                timer: Timer = helper.timer(peer.name, bench.case, bench.sets, bench.rounds)
                entry, key = _Entry(peer), id(timer)
            else:
                ready, entry = _from_jax(bench, peer, settings)
                timer, key = ready.timer, id(ready.timer.program)
            if key not in found:
                timer.visit(1)
        except Exception as error:
            _miss(measurement, peer, error, bench.mesh)
        else:
            found.setdefault(key, _Program(timer, [])).entries.append(entry)
    return list(found.values())


def _from_jax(bench: Bench, peer: Peer, settings: Settings) -> tuple[Ready, _Entry]:
    found = bench.ready(peer.name)
    if isinstance(found, Exception):
        raise found
    best, looks = fastest(found)
    entry = _Entry(peer, config=best.config, looks=looks)
    if peer.role == FUSED:
        is_ours = best.backend == "pallas" or not bench.case.needs_kernel
        if peer.name == "fused" and bench.on_gpu and not is_ours:
            raise UnavailableError("the call launched no kernel of Stretto")
        entry.backend = best.backend
    if peer.is_checked and settings.check:
        entry.error = bench.check(best)
    if peer.role in (FUSED, XLA) and settings.check:
        entry.float32_error = bench.float32_error_of(best)
    return best, entry


def fastest(found: list[Ready]) -> tuple[Ready, dict[str, float]]:
    """The candidate with the best of two samples, and each one's, by its configuration.

    An only candidate is taken untimed.
    """
    if len(found) == 1:
        return found[0], {}
    looks = [min(ready.timer.visit(2)) for ready in found]
    best = min(range(len(found)), key=lambda place: looks[place])
    return found[best], {r.config: round(us, 3) for r, us in zip(found, looks, strict=True)}


def _take_turns(
    programs: list[_Program],
    settings: Settings,
    measurement: Measurement,
    bench: Bench,
    say: Callable[[str], None],
) -> None:
    """Fills in the samples and clocks of all programs; one that fails gets no samples."""
    reader = Clocks(bench.on_gpu)

    def visited(place: int) -> None:
        if (clock := reader.read()) is not None:
            programs[place].clocks.append(clock)
            measurement.most_mhz = clock.most_mhz

    def failed(place: int, error: Exception) -> None:
        for entry in programs[place].entries:
            _miss(measurement, entry.peer, error, bench.mesh)

    def enough(found: Sequence[Sequence[float]]) -> bool:
        if settings.enough is None:
            return False
        of_peers = {
            entry.peer.name: samples
            for program, samples in zip(programs, found, strict=True)
            for entry in program.entries
        }
        return agreed(settings.enough(of_peers, SAMPLES_PER_VISIT))

    found = in_turns(
        [program.timer for program in programs],
        settings.repeats,
        seed=settings.seed,
        rest_s=settings.rest_s,
        visited=visited,
        failed=failed,
        enough=enough,
        say=say,
    )
    for program, samples in zip(programs, found, strict=True):
        program.samples = samples


def _timed(entry: _Entry, program: _Program) -> Timed:
    times = spread(program.samples)
    return Timed(
        peer=entry.peer.name,
        role=entry.peer.role,
        time=times.median,
        time_p10=times.p10,
        time_p90=times.p90,
        samples=[round(sample, 3) for sample in program.samples],
        calls=program.timer.calls,
        config=entry.config,
        backend=entry.backend,
        looks=entry.looks,
        relative_error=entry.error,
        float32_error=entry.float32_error,
        temp_bytes=program.timer.temp_bytes,
        mhz=clocks.median_mhz(program.clocks),
        at_power_limit=clocks.share_at_limit(program.clocks),
    )


def _miss(measurement: Measurement, peer: Peer, error: Exception, mesh: Mesh) -> None:
    """Records why `peer` has no time; raises DeviceLostError if the devices stopped responding."""
    reason = first_line(error)
    measurement.missing.append(Missing(peer=peer.name, reason=reason))
    if not isinstance(error, UnavailableError | ValueError | NotImplementedError):
        _check_alive(mesh, peer, reason)


def _check_alive(mesh: Mesh, peer: Peer, reason: str) -> None:
    try:
        for device in mesh.local_devices:
            jax.block_until_ready(jax.device_put(np.zeros(1, np.float32), device) + 1)
    except Exception as error:
        raise DeviceLostError(
            f"the devices stopped responding after {peer.name} failed ({reason}):"
            f" {first_line(error)}"
        ) from error
