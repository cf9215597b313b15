"""Predicted beside measured, and planned steps, for docs/measure/planning.md."""

from __future__ import annotations

from collections.abc import Sequence

from stretto.benchmarks.cases import shapes
from stretto.benchmarks.errors import BenchmarkError
from stretto.benchmarks.pages.markdown import NONE, rows
from stretto.benchmarks.pages.terminal import number, peer_label, percent
from stretto.benchmarks.predict import over_nodes
from stretto.benchmarks.predict.model import model, parameters_of
from stretto.benchmarks.predict.samples import WAYS
from stretto.benchmarks.scaling import checked, decoder, plan
from stretto.benchmarks.scaling.checked import Checked, Summary
from stretto.benchmarks.scaling.planned import ForGpus
from stretto.benchmarks.scaling.steps import step_model
from stretto.benchmarks.targets import machine_file

MODELS = ("7b", "70b", "mixture-30b")
MACHINES = ("dgx-h100", "hgx-h200", "gb200-nvl72")
COUNTS = (8, 64, 512)
PEERS = {"communication": "collective alone", "fused": "Stretto", "xla": "XLA"}


def summary_table() -> str:
    """A row for every group of measured times, and one for all."""
    calls, steps = [*checked.calls(), *checked.over_nodes()], checked.steps()
    found = checked.summaries(calls)
    found.append(checked.summary("**all of these**", calls))
    found += checked.summaries(steps)
    found += checked.summaries(checked.older_calls())
    return summary_rows(found)


def summary_rows(found: Sequence[Summary]) -> str:
    """Summaries as a table."""
    body = [
        [
            one.group,
            str(one.times),
            f"{100 * one.median:.1f}%",
            f"{100 * one.most:.0f}%",
            f"{100 * one.inside:.1f}%",
        ]
        for one in found
    ]
    header = ["what", "times", "median error", "95% below", "within the interval"]
    return rows(header, body)


def steps_table() -> str:
    """Every measured part of a step, in milliseconds."""
    body = [
        [
            row.what,
            str(row.devices),
            row.peer,
            f"{row.measured / 1e3:.2f}",
            f"{row.predicted / 1e3:.2f}",
            f"{row.low / 1e3:.2f} to {row.high / 1e3:.2f}",
            _percent(row),
        ]
        for row in checked.steps()
    ]
    header = ["step", "GPUs", "how", "measured", "predicted", "interval", "off by"]
    return rows(header, body, left=1)


def page(names: Sequence[str]) -> str:
    """The whole of docs/results/predicted.md, of the results files with these names."""
    parts = [
        "# Predicted beside measured\n",
        "[Planning](../measure/planning.md) explains how a time is predicted."
        " Every case is predicted by a fit without it. Calls are in microseconds, steps"
        " in milliseconds; a time outside its interval is bold."
        " Written by `stretto bench predicted --page docs/results/predicted.md` from"
        f" {', '.join(names)} and the times noted in pages; do not edit.\n",
        "## Steps of the transformer\n",
        steps_table(),
    ]
    groups: dict[str, list[Checked]] = {}
    for row in checked.calls():
        groups.setdefault(f"{row.where}, {row.devices} GPUs", []).append(row)
    for row in checked.over_nodes():
        groups.setdefault(row.where, []).append(row)
    for title, found in sorted(groups.items()):
        parts += [f"## {title}\n".replace(", 1 GPUs", ", 1 GPU"), _cases(found)]
        parts += _disturbed(title)
    return "\n".join(parts)


def _disturbed(title: str) -> list[str]:
    """The times of a job over nodes that other programs disturbed."""
    found = [one for one in over_nodes.times() if one.is_disturbed and one.where == title]
    if not found:
        return []
    body = [
        [
            f"`{one.case.operation.name}`",
            shapes.text_of(one.case.sizes),
            one.version,
            number(one.us),
            number(one.p10),
        ]
        for one in found
    ]
    said = (
        "Other programs had the GPUs for many samples of these, whose medians lie more than"
        f" {100 * (over_nodes.SCATTER - 1):.0f}% beyond the tenth percentile; they count, too.\n"
    )
    header = ["operation", "shape", "version", "median", "tenth percentile"]
    return [said, rows(header, body, left=3)]


def _cases(found: Sequence[Checked]) -> str:
    """A row a case, a column a peer: measured / predicted."""
    timed = dict.fromkeys(row.peer for row in found)
    peers = sorted(timed, key=lambda peer: _ORDER.index(peer) if peer in _ORDER else len(_ORDER))
    cases: dict[str, dict[str, Checked]] = {}
    for row in found:
        cases.setdefault(row.what, {})[row.peer] = row
    body = []
    for what, by_peer in cases.items():
        kernel, shape, _ = what.split(" ")
        cells = [_cell(by_peer.get(peer)) for peer in peers]
        body.append([f"`{kernel}`", shape, *cells])
    header = ["operation", "shape", *(PEERS.get(peer, peer_label(peer)) for peer in peers)]
    return "Measured / predicted (interval).\n\n" + rows(header, body, left=2)


_ORDER = ("matmul", "own-matmul", "communication", "fused", "xla")


def _cell(row: Checked | None) -> str:
    if row is None:
        return NONE
    interval = f"({number(row.low)} to {number(row.high)})"
    measured = number(row.measured) if row.is_inside else f"**{number(row.measured)}**"
    return f"{measured} / {number(row.predicted)} {interval}"


def _percent(row: Checked) -> str:
    text = f"{100 * (row.predicted / row.measured - 1):+.0f}%"
    return text if row.is_inside else f"**{text}**"


def fitted_table() -> str:
    """The parameters of every way of making a call, and of a step."""
    found = model()
    body = []
    for way in WAYS:
        names = parameters_of(way).names
        named = zip(names, found.fit[way], strict=True)
        body.append([way, ", ".join(f"{name} {value:.3g}" for name, value in named)])
    factors = zip(("forward", "backward", "optimizer"), step_model().factors, strict=True)
    body.append(["bytes of a step", ", ".join(f"{name} {value:.3g}" for name, value in factors)])
    return rows(["way", "parameters"], body, left=2)


def planned_table() -> str:
    """The best split of each model on each machine, at each number of GPUs."""
    body = []
    for name in MACHINES:
        target = machine_file.read(name)
        for one in map(decoder.read, MODELS):
            for count in COUNTS:
                found = plan.over(step_model(), one, count, one.batch, target)
                body.append([target.name, one.name, str(count), *_planned_cells(found)])
    header = ["machine", "model", "GPUs", "split", "how", "step, s", "interval", "exposed", "GB"]
    return rows(header, body, left=5)


def _planned_cells(found: ForGpus) -> list[str]:
    if not found.best:
        why = f"none fits: the least needs {found.least_gb:.0f} GB"
        return [why, NONE, NONE, NONE, NONE, NONE]
    best = found.best[0]
    return [
        best.split,
        best.how,
        number(best.step_s),
        f"{number(best.low_s)} to {number(best.high_s)}",
        percent(best.exposed_s / best.step_s),
        f"{best.memory_gb:.0f}",
    ]


def between(text: str, name: str, content: str, path: str) -> str:
    """`text` with `content` between its markers `<!-- name -->` and `<!-- /name -->`.

    Raises:
      BenchmarkError: it lacks one.
    """
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    first, last = text.find(begin), text.find(end)
    if first < 0 or last < first:
        raise BenchmarkError(f"{path} needs a line {begin} and after it a line {end}.")
    return f"{text[: first + len(begin)]}\n{content}{text[last:]}"
