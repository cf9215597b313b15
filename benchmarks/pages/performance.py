"""The documented times: the README's table and the whole of docs/measure/performance.md."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Sequence

from stretto.benchmarks.errors import BenchmarkError
from stretto.benchmarks.measurements.figures import Scaling, strong_efficiencies, weak_efficiencies
from stretto.benchmarks.measurements.results import (
    Measurement,
    Prediction,
    Results,
    in_order,
    order_of,
)
from stretto.benchmarks.measurements.select import is_goal, latest
from stretto.benchmarks.pages import markdown, terminal
from stretto.benchmarks.pages.markdown import microseconds, rows
from stretto.benchmarks.pages.terminal import interval

LEFT_OUT = ("auto", "xla-windowed")
"""Peers whose columns the README has no room for; the page has them."""


def readme_times(found: list[Results]) -> str:
    """The goals' shapes of the fused matmuls on the most devices, and the machine in a sentence.

    Of one type of card, that of the last file which holds any; the page has the others.
    """
    goals = [pair for pair in latest(found) if is_goal(pair[1]) and pair[1].type == "bfloat16"]
    goals = [pair for pair in goals if pair[0].machine.num_processes == 1] or goals
    most = max((measurement.devices for _, measurement in goals), default=0)
    chosen = [pair for pair in goals if pair[1].devices == most]
    cards = [one.machine.card for one in found if any(pair[0] is one for pair in chosen)]
    chosen = [pair for pair in chosen if pair[0].machine.card == cards[-1]]
    chosen.sort(key=lambda pair: _order(pair[1]))
    if not chosen:
        raise BenchmarkError('the results hold no case of the shape set "goals".')
    machines = dict.fromkeys(terminal.machine_line(one) + _commit(one) for one, _ in chosen)
    return (
        f"Microseconds on {most} devices ({'; '.join(machines)}); in brackets the share of the"
        " floor, which is the larger of the matmul alone and of the bytes to be sent at"
        f" {chosen[0][0].link_gb_per_s:.0f} GB/s.\n\n"
        + markdown.times_table([measurement for _, measurement in chosen], LEFT_OUT)
    )


def _order(measurement: Measurement) -> tuple:
    work = math.prod(measurement.sizes.values())
    return (order_of(measurement.kernel), -measurement.devices, work, measurement.key)


def page(found: list[Results], names: list[str], pictures: Sequence[str] = ()) -> str:
    """The whole of docs/measure/performance.md; `pictures` are files, as the page reaches them."""
    parts = ["# Performance\n"]
    if not found:
        return parts[0] + "\nNo results yet: `stretto bench document FILE...` writes this page.\n"
    parts += [
        f"Written by `stretto bench document {' '.join(names)}`; do not edit."
        " [Benchmarks](benchmarks.md) tells how times are taken and what the columns mean."
        " Times are medians in microseconds of one call, on the slowest device.\n",
    ]
    groups: dict[str, list[tuple[Results, Measurement]]] = {}
    for one, measurement in latest(found):
        groups.setdefault(f"{one.machine.card}, {one.machine.layout}", []).append(
            (one, measurement)
        )
    for title, pairs in groups.items():
        parts.append(f"## {title}\n")
        for one in {id(one): one for one, _ in pairs}.values():
            parts.append(f"{terminal.machine_line(one)}; {one.start_time[:10]}{_commit(one)}.\n")
        parts += _sections(sorted((m for _, m in pairs), key=_order))
        parts += _predicted([p for one in found for p in one.predictions], [m for _, m in pairs])
    if pictures:
        parts.append("## Pictures\n")
        parts += [f"![{pathlib.PurePath(path).stem}]({path})\n" for path in pictures]
    missing = [text for one in found if (text := markdown.missing_list(one))]
    if missing:
        parts.append("## No times\n")
        parts.append("".join(dict.fromkeys("".join(missing).splitlines(keepends=True))))
    return "\n".join(parts)


def _commit(one: Results) -> str:
    """Of which state of the code the results are, to end a list with; "" if that is not known."""
    return f", commit {one.machine.commit}" if one.machine.commit else ""


def _sections(measurements: list[Measurement]) -> list[str]:
    parts = []
    for kernel in in_order(m.kernel for m in measurements):
        for devices in sorted({m.devices for m in measurements}, reverse=True):
            cases = [m for m in measurements if m.kernel == kernel and m.devices == devices]
            if cases:
                plural = "device" if devices == 1 else "devices"
                parts.append(f"### `{kernel}`, {devices} {plural}\n")
                parts.append(markdown.kernel_table(cases))
    if limits := markdown.limits_table(measurements):
        parts += ["### What the limit of waits costs (median, p10 to p90)\n", limits]
    if worst := terminal.never_slower_line(measurements):
        parts += ["### `auto` beside XLA\n", worst + ".\n"]
    parts += _scaling("Strong scaling", strong_efficiencies(measurements, "fused"))
    parts += _scaling("Weak scaling", weak_efficiencies(measurements, "fused"))
    return parts


def _scaling(title: str, found: Scaling) -> list[str]:
    """Efficiencies of our kernel per device count; nothing if there is just one count."""
    counts = sorted({count for row in found.values() for count in row})
    if len(counts) < 2:
        return []
    body = []
    for (kernel, shape, dtype), row in found.items():
        cells = [terminal.percent(row.get(count)) or markdown.NONE for count in counts]
        body.append([f"`{kernel}`", shape, dtype, *cells])
    header = ["kernel", "shape on one device", "type", *(str(count) for count in counts)]
    return [f"### {title}, by devices\n", rows(header, body, left=3)]


def _predicted(predictions: Sequence[Prediction], measurements: Sequence[Measurement]) -> list[str]:
    """Predicted times beside the measured ones; nothing if nothing was predicted."""
    if not predictions:
        return []
    measured = {m.key: m for m in measurements}
    body = []
    for one in sorted(predictions, key=lambda p: (order_of(p.kernel), p.shape, p.devices)):
        real = measured.get(one.key)
        cells = [interval(one.fused, one.fused_low, one.fused_high)]
        cells += [microseconds(real and real.of("fused"))]
        cells += [
            interval(one.xla, one.xla_low, one.xla_high),
            microseconds(real and real.of("xla")),
        ]
        body.append([f"`{one.kernel}`", one.shape, str(one.devices), *cells])
    header = ["kernel", "shape", "devices", "Stretto, predicted", "measured", "XLA, predicted"]
    return ["### Predicted\n", rows([*header, "measured"], body, left=2)]
