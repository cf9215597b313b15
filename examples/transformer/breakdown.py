"""Where a program's time goes: the kernels of a profile, by kind and by name."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax

# The first pattern that is in a kernel's name says what kind it is; what fits none is elementwise:
# norms, activations, rotary positions, sums, and whatever XLA fused with them.
KINDS = {
    "fused": "all_gather_matmul|matmul_reduce_scatter|matmul_all_reduce",
    "collective": "nccl|all[_-]?gather|reduce[_-]?scatter|all[_-]?reduce|barrier",
    "attention": "cudnn|fmha|flash|sdpa",
    "matmul": "gemm|nvjet|xmma|cutlass|cublas|dot|matmul",
    "copy": "memcpy|memset|copy|transpose|slice|concatenate|pad|broadcast",
}
OTHER = "elementwise"


class Span(NamedTuple):
    """A kernel's run on a device, in nanoseconds."""

    name: str
    start: float
    end: float


@dataclasses.dataclass(frozen=True)
class Breakdown:
    """One run of a program on one device, in milliseconds.

    Attributes:
      kinds: time of each kind's kernels; those that ran side by side count each.
      kernels: (name, milliseconds, runs), the longest first.
      idle: time in which no kernel ran, between the first and the last.
      exposed: time in which nothing but collectives ran.
    """

    kinds: dict[str, float]
    kernels: list[tuple[str, float, float]]
    idle: float
    exposed: float


def kind_of(name: str) -> str:
    """The kind of kernel that has this name."""
    for kind, pattern in KINDS.items():
        if re.search(pattern, name, re.IGNORECASE):
            return kind
    return OTHER


def profile(run: Callable[[], object], runs: int, folder: Path) -> Breakdown:
    """Profiles `runs` calls of `run`, each of which waits for its end, into `folder`.

    The profile stays there; Perfetto and XProf show it.

    Raises:
      RuntimeError: the profile holds no kernel.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with jax.profiler.trace(str(folder), profiler_options=options):
        for _ in range(runs):
            run()
    files = sorted(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    spans = read(files[-1]) if files else []
    if not spans:
        raise RuntimeError(f"{folder} holds no kernel's time")
    return summarise(spans, runs)


def read(file: Path) -> list[Span]:
    """The kernels of the first device in a profile, or its operations where it is a CPU."""
    planes = {plane.name: plane for plane in jax.profiler.ProfileData.from_file(str(file)).planes}
    gpus = sorted(name for name in planes if name.startswith("/device:GPU"))
    if gpus:
        lines = [line for line in planes[gpus[0]].lines if line.name.startswith("Stream")]
        events = [event for line in lines for event in line.events]
    else:
        lines = planes["/host:CPU"].lines
        events = [event for line in lines for event in line.events if _is_first_devices(event)]
    return [Span(e.name, e.start_ns, e.start_ns + e.duration_ns) for e in events]


def _is_first_devices(event: Any) -> bool:
    stats = {name: value for name, value in event.stats if name in ("hlo_op", "device_ordinal")}
    return "hlo_op" in stats and stats.get("device_ordinal") == 0


def summarise(spans: Iterable[Span], runs: int, longest: int = 40) -> Breakdown:
    """The `Breakdown` of the mean of `runs` runs; of kernels it keeps the `longest`."""
    spans = list(spans)
    counts = Counter(span.name for span in spans)
    kernels, kinds = defaultdict[str, float](float), defaultdict[str, float](float)
    for span in spans:
        kernels[span.name] += span.end - span.start
        kinds[kind_of(span.name)] += span.end - span.start
    whole = max(span.end for span in spans) - min(span.start for span in spans)
    busy = _covered(spans)
    alone = busy - _covered([span for span in spans if kind_of(span.name) != "collective"])
    scale = 1e-6 / runs
    return Breakdown(
        kinds={kind: time * scale for kind, time in _longest_first(kinds)},
        kernels=[
            (name, time * scale, counts[name] / runs)
            for name, time in _longest_first(kernels)[:longest]
        ],
        idle=(whole - busy) * scale,
        exposed=alone * scale,
    )


def _longest_first(times: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(times.items(), key=lambda item: -item[1])


def _covered(spans: list[Span]) -> float:
    """The time in which at least one of them ran."""
    total, reached = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.start):
        total += max(0.0, span.end - max(span.start, reached))
        reached = max(reached, span.end)
    return total
