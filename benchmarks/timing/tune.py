"""Finds the fastest configuration of a kernel for one case, and its time beside XLA's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stretto.benchmarks.cases.candidate import Candidate
from stretto.benchmarks.cases.case import Case
from stretto.benchmarks.cases.meshes import mesh_of
from stretto.benchmarks.errors import UnavailableError
from stretto.benchmarks.measurements.spread import spread
from stretto.benchmarks.measurements.tuned_file import entry_of
from stretto.benchmarks.peers.peer import FUSED, Peer
from stretto.benchmarks.peers.peers import PEERS
from stretto.benchmarks.timing import memory
from stretto.benchmarks.timing.compiling import Compiler
from stretto.benchmarks.timing.measure import Settings
from stretto.benchmarks.timing.prepare import Bench, Ready
from stretto.benchmarks.timing.turns import in_turns
from stretto.kernels.choice import choose
from stretto.kernels.choice.config_data import to_data
from stretto.kernels.choice.tables import Entry
from stretto.kernels.problem.machine import Machine

TUNED = "tuned"
FINALISTS = 3
SAMPLES_PER_VISIT = 2


def configs_for(case: Case, machine: Machine) -> list[Any]:
    """What the kernel that serves `case` on such a machine offers to be tried, each once.

    Raises:
      UnavailableError: no kernel serves it.
    """
    problem = case.problem(machine)
    if not case.operation.kernels:
        raise UnavailableError(f"{case.operation.name} has no kernel")
    kernel, obstacle = choose.serving(case.operation, problem)
    if obstacle is not None:
        raise UnavailableError(obstacle)
    return list(dict.fromkeys(kernel.candidates(problem)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepared:
    """A case whose configurations are being compiled, or the reason why it cannot be tuned."""

    case: Case
    configs: Sequence[Any]
    bench: Bench | None
    reason: str = ""


def prepare(
    case: Case,
    configs: Sequence[Any],
    settings: Settings,
    compiler: Compiler,
    *,
    backend: str = "pallas",
) -> Prepared:
    """Traces XLA's program and one for each of `configs`, and begins to compile them."""
    mesh = mesh_of(case.devices)
    try:
        case.check()
        memory.check_fits(case, mesh)
    except UnavailableError as error:
        return Prepared(case=case, configs=configs, bench=None, reason=str(error))
    bench = Bench(case, mesh, settings.seed, compiler)
    bench.begin([PEERS["xla"], _peer(configs, backend)], lambda: False, settings.check)
    return Prepared(case=case, configs=configs, bench=bench)


def take(
    prepared: Prepared,
    settings: Settings,
    versions: Mapping[str, str],
    say: Callable[[str], None] = lambda _: None,
) -> Entry:
    """The `Entry` of a prepared case: the fastest configuration that gives the right result.

    The compiler must have ended.

    Raises:
      UnavailableError: the case cannot be cut or does not fit, or no configuration works.
    """
    case, bench = prepared.case, prepared.bench
    if bench is None:
        raise UnavailableError(prepared.reason)
    ours, (xla, *_) = _ready(bench, TUNED), _ready(bench, "xla")
    say(f"first look at {len(ours)} configurations")
    ranked = sorted(ours, key=lambda ready: min(ready.timer.visit(SAMPLES_PER_VISIT)))
    finalists = _right_ones(bench, ranked, settings)
    xla.timer.visit(1)
    say(f"timing {len(finalists)} finalists and XLA")
    medians = _medians([*finalists, xla], settings)
    best = min(range(len(finalists)), key=lambda index: medians[index])
    config = to_data(prepared.configs[int(finalists[best].candidate.config)])
    return entry_of(case, config, medians[best], medians[-1], versions)


def _peer(configs: Sequence[Any], backend: str) -> Peer:
    """Our configurations as candidates, each named by its index in `configs`."""

    def candidates(case: Case, mesh: Any) -> list[Candidate]:
        return [
            Candidate(body=case.call(backend, config), operands=case.operands, config=str(index))
            for index, config in enumerate(configs)
        ]

    return Peer(name=TUNED, label=TUNED, role=FUSED, candidates=candidates, by_xla=False)


def _ready(bench: Bench, name: str) -> list[Ready]:
    found = bench.ready(name)
    if isinstance(found, Exception):
        raise UnavailableError(f"{name}: {found}") from found
    return found


def _medians(entries: Sequence[Ready], settings: Settings) -> list[float]:
    """The median time of each, in microseconds."""
    found = in_turns(
        [entry.timer for entry in entries],
        settings.repeats,
        seed=settings.seed,
        per_visit=SAMPLES_PER_VISIT,
    )
    return [spread(samples).median for samples in found]


def _right_ones(bench: Bench, ranked: list[Ready], settings: Settings) -> list[Ready]:
    """The first few of `ranked` whose results agree with XLA's."""
    right: list[Ready] = []
    reason: UnavailableError | None = None
    for ready in ranked:
        if len(right) == FINALISTS:
            break
        try:
            if settings.check:
                bench.check(ready)
        except UnavailableError as error:
            reason = error
        else:
            right.append(ready)
    if not right:
        raise reason or UnavailableError("no configuration works")
    return right
