"""Finds the fastest configuration of a kernel for one case, and its time beside XLA's."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stretto.kernels.choice.dispatch import Problem

from stretto.benchmarks import memory
from stretto.benchmarks.compiling import Compiler
from stretto.benchmarks.errors import BenchmarkError, UnavailableError
from stretto.benchmarks.measure import Settings, mesh_of
from stretto.benchmarks.operations import Case
from stretto.benchmarks.peers import FUSED, PEERS, Peer
from stretto.benchmarks.prepare import Bench, Ready
from stretto.benchmarks.programs import Candidate
from stretto.benchmarks.spread import spread
from stretto.benchmarks.tuned_file import entry_of
from stretto.kernels.choice.tables import Entry, config_to_data
from stretto.kernels.collectives import choice as moving

TUNED = "tuned"
FINALISTS = 3
SAMPLES_PER_VISIT = 2


def kernel_named(name: str) -> Any:
    """What the choice of a backend asks of a kernel; BenchmarkError if there is none so called."""
    if name in moving.COLLECTIVES:
        return moving.COLLECTIVES[name]
    try:
        return importlib.import_module(f"stretto.kernels.fused.{name}")
    except ImportError:
        raise BenchmarkError(f"{name} has no configurations to tune.") from None


def config_type_of(kernel: str) -> Any:
    """The type of a kernel's configurations; BenchmarkError if it has none to tune."""
    return kernel_named(kernel).Config


def candidates_of(config_type: Any, problem: Problem) -> list[Any]:
    """What the kernel's module offers for `problem`, each once."""
    offer = config_type.candidates
    # A kernel whose choice depends on the problem takes it, others have the same for all.
    takes_problem = bool(inspect.signature(offer).parameters)
    return list(dict.fromkeys(offer(problem) if takes_problem else offer()))


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
    medians = _in_turns([*finalists, xla], settings)
    best = min(range(len(finalists)), key=lambda index: medians[index])
    config = config_to_data(prepared.configs[int(finalists[best].candidate.config)])
    return entry_of(case, config, medians[best], medians[-1], versions)


def tune(
    case: Case,
    configs: Sequence[Any],
    settings: Settings,
    versions: Mapping[str, str],
    *,
    backend: str = "pallas",
) -> Entry:
    """`prepare` and `take` of a single case."""
    with Compiler() as compiler:
        prepared = prepare(case, configs, settings, compiler, backend=backend)
        compiler.wait()
        return take(prepared, settings, versions)


def _peer(configs: Sequence[Any], backend: str) -> Peer:
    """Our configurations as candidates, each named by its index in `configs`."""

    def candidates(case: Case, mesh: Any) -> list[Candidate]:
        return [
            Candidate(
                body=case.operation.public(backend, config), blocks=case.blocks, config=str(index)
            )
            for index, config in enumerate(configs)
        ]

    return Peer(name=TUNED, label=TUNED, role=FUSED, candidates=candidates, by_xla=False)


def _ready(bench: Bench, name: str) -> list[Ready]:
    found = bench.ready(name)
    if isinstance(found, Exception):
        raise UnavailableError(f"{name}: {found}") from found
    return found


def _in_turns(entries: Sequence[Ready], settings: Settings) -> list[float]:
    """The median time of each, visited in a new random order each round."""
    samples: list[list[float]] = [[] for _ in entries]
    order = random.Random(settings.seed)
    for _ in range(-(-settings.repeats // SAMPLES_PER_VISIT)):
        for index in order.sample(range(len(entries)), len(entries)):
            samples[index] += entries[index].timer.visit(SAMPLES_PER_VISIT)
    return [spread(taken).median for taken in samples]


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
