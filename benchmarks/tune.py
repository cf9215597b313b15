"""Finds the fastest configuration of a kernel for one case, and its time beside XLA's."""

from __future__ import annotations

import importlib
import inspect
import random
from collections.abc import Callable, Sequence
from typing import Any

from stretto.benchmarks import memory
from stretto.benchmarks.errors import BenchmarkError, UnavailableError
from stretto.benchmarks.measure import Settings, mesh_of
from stretto.benchmarks.operations import Case
from stretto.benchmarks.peers import FUSED, PEERS, Peer
from stretto.benchmarks.prepare import Bench, Ready, compile_all
from stretto.benchmarks.programs import Candidate
from stretto.benchmarks.spread import spread
from stretto.kernels.dispatch import Problem
from stretto.kernels.tables import Entry, config_to_data

FINALISTS = 4
SAMPLES_PER_VISIT = 2


def config_type_of(kernel: str) -> Any:
    """The `Config` of a kernel's module; BenchmarkError if it has none to tune."""
    try:
        return importlib.import_module(f"stretto.kernels.{kernel}").Config
    except (ImportError, AttributeError):
        raise BenchmarkError(f"{kernel} has no configurations to tune.") from None


def candidates_of(config_type: Any, problem: Problem) -> list[Any]:
    """What the kernel's module offers for `problem`, each once."""
    offer = config_type.candidates
    # A kernel whose choice depends on the problem takes it, others have the same for all.
    takes_problem = bool(inspect.signature(offer).parameters)
    return list(dict.fromkeys(offer(problem) if takes_problem else offer()))


def tune(
    case: Case,
    configs: Sequence[Any],
    settings: Settings,
    versions: dict[str, str],
    *,
    backend: str = "pallas",
    say: Callable[[str], None] = lambda _: None,
) -> Entry:
    """The `Entry` of `case`: the fastest of `configs` that gives the right result.

    Raises:
      UnavailableError: the case cannot be cut or does not fit, or no configuration works.
    """
    mesh = mesh_of(case.devices)
    case.check()
    memory.check_fits(case, mesh)
    bench = Bench(case, mesh, settings.seed)
    say(f"compiling {len(configs)} configurations")
    ours, xla = _compiled(bench, configs, backend)
    say(f"first look at {len(ours)} configurations")
    ranked = sorted(ours, key=lambda ready: min(ready.timer.visit(SAMPLES_PER_VISIT)))
    finalists = _right_ones(bench, ranked, settings)
    xla.timer.visit(1)
    say(f"timing {len(finalists)} finalists and XLA")
    medians = _in_turns([*finalists, xla], settings)
    best = min(range(len(finalists)), key=lambda index: medians[index])
    return Entry(
        op=case.operation.name,
        m=case.shape.m,
        k=case.shape.k,
        n=case.shape.n,
        dtype=case.dtype,
        devices=case.devices,
        fused_us=round(medians[best], 2),
        xla_us=round(medians[-1], 2),
        config=config_to_data(configs[int(finalists[best].candidate.config)]),
        versions=versions,
    )


def _compiled(bench: Bench, configs: Sequence[Any], backend: str) -> tuple[list[Ready], Ready]:
    """Our candidates that compile, each with its index in `configs` as its name, and XLA's."""

    def candidates(case: Case, mesh: Any) -> list[Candidate]:
        return [
            Candidate(
                body=case.operation.public(backend, config), blocks=case.blocks, config=str(index)
            )
            for index, config in enumerate(configs)
        ]

    peer = Peer(name="tuned", label="tuned", role=FUSED, candidates=candidates, by_xla=False)
    found = compile_all(bench, [PEERS["xla"], peer], lambda: False)
    for name in ("xla", "tuned"):
        reason = found[name]
        if isinstance(reason, Exception):
            raise UnavailableError(f"{name}: {reason}") from reason
    return found["tuned"], found["xla"][0]  # type: ignore[return-value, index]


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
                bench.check(ready.candidate)
        except UnavailableError as error:
            reason = error
        else:
            right.append(ready)
    if not right:
        raise reason or UnavailableError("no configuration works")
    return right
