"""A page of every result of each machine, in docs/results/."""

from __future__ import annotations

import re
from collections.abc import Sequence

from stretto.benchmarks.measurements.figures import Scaling, strong_efficiencies, weak_efficiencies
from stretto.benchmarks.measurements.results import (
    Measurement,
    Prediction,
    Results,
    in_order,
    order_of,
)
from stretto.benchmarks.measurements.select import case_order, latest
from stretto.benchmarks.pages import markdown, terminal
from stretto.benchmarks.pages.markdown import microseconds, rows
from stretto.benchmarks.pages.terminal import interval

INDEX = """\
Every time in the results files that come with Stretto, a page for each type of card and layout.
[Predicted beside measured](predicted.md) compares them with the model of time.
"""


def pages(found: list[Results], names: list[str]) -> dict[str, str]:
    """By the name of its file, the page of each type of card and layout."""
    groups: dict[str, list[tuple[Results, Measurement]]] = {}
    for one, measurement in latest(found):
        title = f"{one.machine.card}, {one.machine.layout}"
        groups.setdefault(title, []).append((one, measurement))
    predictions = [p for one in found for p in one.predictions]
    made = {
        f"{_slug(title)}.md": _page(title, pairs, names, predictions)
        for title, pairs in groups.items()
    }
    links = [f"- [{title}]({_slug(title)}.md)" for title in groups]
    made["index.md"] = "\n".join(["# Results\n", INDEX, *links, ""])
    return made


def machine_of(one: Results) -> str:
    """The machine of a results file in a line, and the commit that was measured."""
    commit = f", commit {one.machine.commit}" if one.machine.commit else ""
    return f"{terminal.machine_line(one)}; {one.start_time[:10]}{commit}"


def machine_and_clocks(one: Results) -> str:
    """The same, and the clocks while it measured, where its cards told."""
    clocks = terminal.clocks_sentence(one.measurements)
    return machine_of(one) + (f"; {clocks}" if clocks else "")


def _slug(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def _page(
    title: str,
    pairs: Sequence[tuple[Results, Measurement]],
    names: Sequence[str],
    predictions: Sequence[Prediction],
) -> str:
    files = list({id(one): one for one, _ in pairs}.values())
    measurements = [measurement for _, measurement in pairs]
    parts = [
        f"# {title}\n",
        "Times are medians in microseconds of one call, on the slowest device."
        " [Benchmarks](../measure/benchmarks.md) says how they are taken,"
        " [Reading a report](../measure/reading_a_report.md) what the columns mean.\n",
        *(f"- {machine_and_clocks(one)}" for one in files),
        "",
        *_sections(sorted(measurements, key=case_order)),
        *_predicted(predictions, measurements),
    ]
    if missing := [text for one in files if (text := markdown.missing_list(one))]:
        lines = dict.fromkeys("".join(missing).splitlines(keepends=True))
        parts += ["## No times\n", "".join(lines)]
    return "\n".join([*parts, markdown.written_by(names)])


def _sections(measurements: list[Measurement]) -> list[str]:
    parts = []
    for kernel in in_order(m.kernel for m in measurements):
        for devices in sorted({m.devices for m in measurements}, reverse=True):
            cases = [m for m in measurements if m.kernel == kernel and m.devices == devices]
            if cases:
                plural = "device" if devices == 1 else "devices"
                parts.append(f"## `{kernel}`, {devices} {plural}\n")
                parts.append(markdown.kernel_table(cases))
    if limits := markdown.limits_table(measurements):
        parts += ["## What the limit of waits costs (median, p10 to p90)\n", limits]
    if worst := terminal.never_slower_line(measurements):
        parts += ["## `auto` beside XLA\n", worst + ".\n"]
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
    return [f"## {title}, by devices\n", rows(header, body, left=3)]


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
    return ["## Predicted\n", rows([*header, "measured"], body, left=2)]
