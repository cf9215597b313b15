"""Times every peer of one case in turns, so that the card's drift meets all of them alike."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable
from typing import Protocol

import jax
import numpy as np
from jax.sharding import Mesh

from stretto.benchmarks import figures, memory
from stretto.benchmarks.errors import DeviceLostError, UnavailableError
from stretto.benchmarks.operations import AXIS, Case
from stretto.benchmarks.peers import FUSED, Peer, applies
from stretto.benchmarks.prepare import Bench, Ready, compile_all
from stretto.benchmarks.results import Measurement, Missing, Timed
from stretto.benchmarks.spread import spread
from stretto.benchmarks.timing import Timer

SAMPLES_PER_VISIT = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """How each case is timed.

    `repeats` samples per peer, in visits of `SAMPLES_PER_VISIT` with `rest_s` seconds of idle
    between; `check` compares our kernels' results with XLA's first.
    """

    repeats: int = 20
    rest_s: float = 0.01
    seed: int = 0
    check: bool = True
    link_gb_per_s: float = 350.0


class Helper(Protocol):
    """The process that times PyTorch's peers."""

    def timer(self, peer: str, case: Case, sets: int) -> Timer:
        """A timer of `peer`; UnavailableError if there is none."""
        ...


@dataclasses.dataclass
class _Entry:
    peer: Peer
    timer: Timer
    config: str = ""
    backend: str = ""
    error: float | None = None
    samples: list[float] = dataclasses.field(default_factory=list)


def mesh_of(devices: int) -> Mesh:
    """The first `devices` devices on the one axis that benchmarks use."""
    return Mesh(np.asarray(jax.devices()[:devices]), (AXIS,))


def measure(
    case: Case,
    peers: list[Peer],
    settings: Settings,
    helper: Helper | None,
    out_of_time: Callable[[], bool],
    say: Callable[[str], None] = lambda _: None,
) -> Measurement:
    """The times of `peers` for `case`.

    A peer that cannot serve the case or fails is recorded with its reason. A case that cannot be
    cut into blocks or does not fit in memory is recorded as skipped, before anything is allocated.

    Raises:
      DeviceLostError: a peer left the devices unusable.
    """
    mesh = mesh_of(case.devices)
    peers = [peer for peer in peers if applies(peer, case)]
    try:
        case.check()
        memory.check_fits(case, mesh)
    except UnavailableError as reason:
        skipped = figures.begin(case, 0)
        skipped.skipped = str(reason)
        return skipped
    bench = Bench(case, mesh, settings.seed)
    measurement = figures.begin(case, bench.sets)
    entries = _enter(bench, peers, settings, helper, measurement, out_of_time, say)
    _take_turns(entries, settings, measurement, mesh, say)
    for entry in entries:
        if entry.samples:
            measurement.timed.append(_timed(entry, case))
    figures.complete(measurement, case, settings.link_gb_per_s)
    return measurement


def _enter(
    bench: Bench,
    peers: list[Peer],
    settings: Settings,
    helper: Helper | None,
    measurement: Measurement,
    out_of_time: Callable[[], bool],
    say: Callable[[str], None],
) -> list[_Entry]:
    """The peers that can be timed, the others recorded as missing."""
    say("compiling")
    ours = [peer for peer in peers if peer.candidates is not None]
    found = compile_all(bench, ours, out_of_time)
    entries = []
    for peer in peers:
        say(f"preparing {peer.label}")
        try:
            if peer.candidates is None:
                if helper is None:
                    raise UnavailableError("PyTorch's helper process is not used in this run")
                entry = _Entry(peer, helper.timer(peer.name, bench.case, bench.sets))
            else:
                entry = _from_jax(bench, peer, found[peer.name], settings)
            entry.timer.visit(1)
        except Exception as error:
            _miss(measurement, peer, error, bench.mesh)
        else:
            entries.append(entry)
    return entries


def _from_jax(
    bench: Bench, peer: Peer, found: list[Ready] | Exception, settings: Settings
) -> _Entry:
    if isinstance(found, Exception):
        raise found
    best = fastest(found)
    if peer.role != FUSED:
        return _Entry(peer, best.timer, config=best.candidate.config)
    # A team of one has nobody to talk to, and is served by XLA.
    if (
        peer.name == "fused"
        and bench.on_gpu
        and best.backend != "pallas"
        and bench.case.devices > 1
    ):
        raise UnavailableError("the call launched no kernel of ours")
    error = bench.check(best.candidate) if settings.check else None
    return _Entry(peer, best.timer, config=best.candidate.config, backend=best.backend, error=error)


def fastest(found: list[Ready]) -> Ready:
    """The candidate with the best of two samples; the only one is taken untimed."""
    if len(found) == 1:
        return found[0]
    return min(found, key=lambda ready: min(ready.timer.visit(2)))


def _take_turns(
    entries: list[_Entry],
    settings: Settings,
    measurement: Measurement,
    mesh: Mesh,
    say: Callable[[str], None],
) -> None:
    """Visits all entries in a new random order each round; one that fails is dropped.

    The order comes from the seed, so it is the same on every process.
    """
    order = random.Random(settings.seed)
    rounds = -(-settings.repeats // SAMPLES_PER_VISIT)
    for index in range(rounds):
        say(f"timing, round {index + 1} of {rounds}")
        for entry in order.sample(entries, len(entries)):
            try:
                entry.samples += entry.timer.visit(SAMPLES_PER_VISIT)
            except Exception as error:
                entries.remove(entry)
                _miss(measurement, entry.peer, error, mesh)
            time.sleep(settings.rest_s)


def _timed(entry: _Entry, case: Case) -> Timed:
    times = spread(entry.samples)
    return Timed(
        peer=entry.peer.name,
        role=entry.peer.role,
        time=times.median,
        time_p10=times.p10,
        time_p90=times.p90,
        samples=[round(sample, 3) for sample in entry.samples],
        calls=entry.timer.calls,
        config=entry.config,
        backend=entry.backend,
        relative_error=entry.error,
    )


def _miss(measurement: Measurement, peer: Peer, error: Exception, mesh: Mesh) -> None:
    """Records why `peer` has no time; raises DeviceLostError if the devices answer no more."""
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
            f"the devices answer no more after {peer.name} failed ({reason}): {first_line(error)}"
        ) from error


def first_line(error: Exception) -> str:
    """The error's type and the first line of its message, at most 300 characters."""
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else ""
    if not isinstance(error, UnavailableError):
        text = f"{type(error).__name__}: {text}"
    return text[:300]
