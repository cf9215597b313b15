"""`stretto bench document`: the documented times, made from results files and never by hand."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import sys
from collections.abc import Sequence

import tyro

from stretto.benchmarks import markdown, plots, results, table
from stretto.benchmarks.errors import BenchmarkError
from stretto.benchmarks.figures import strong_efficiencies, weak_efficiencies
from stretto.benchmarks.markdown import microseconds, rows
from stretto.benchmarks.results import Measurement, Prediction, Results
from stretto.benchmarks.shapes import KERNELS, MATMULS, shapes_of
from stretto.benchmarks.table import number

BEGIN, END = "<!-- times -->", "<!-- /times -->"

LEFT_OUT = ("auto", "xla-windowed")
"""Peers whose columns the README has no room for; the page has them."""


@dataclasses.dataclass(frozen=True)
class DocumentOptions:
    """Write the README's table and docs/performance.md from results of `stretto bench --json`.

    Where two files hold the same case, the times of the run that was begun later are used; the
    order of the files means nothing.
    """

    files: tyro.conf.Positional[tuple[pathlib.Path, ...]]
    """Results files."""
    readme: pathlib.Path = pathlib.Path("README.md")
    """The file that holds the markers `<!-- times -->` and `<!-- /times -->`."""
    page: pathlib.Path = pathlib.Path("docs/performance.md")
    """The page to write."""
    pictures: pathlib.Path | None = None
    """The folder of the page's pictures; default: `pictures` beside the page."""
    check: bool = False
    """Write nothing; exit with status 1 if a text would change."""


def main(argv: list[str]) -> int:
    """Runs `stretto bench document ARGV`; 0, or 1 if `--check` finds a file out of date."""
    options = tyro.cli(DocumentOptions, prog="stretto bench document", args=argv)
    if not options.files:
        raise BenchmarkError("no results; name files that --json wrote.")
    files = _in_order([(path, results.read(path)) for path in options.files])
    found = [one for _, one in files]
    for path, one in files:
        if not one.measurement_of_speed:
            raise BenchmarkError(
                f"{path} was taken on a CPU or in a rehearsal; it is no measurement of speed."
            )
    try:
        readme = options.readme.read_text()
    except OSError as error:
        raise BenchmarkError(f"{options.readme}: {error.strerror}; see --readme.") from None
    times = with_times(readme, readme_times(found), str(options.readme))
    folder = options.pictures or options.page.parent / "pictures"
    if not options.check:
        _draw(found, folder)
    shown = [_relative(path, options.page) for path in sorted(folder.glob("*.svg"))]
    wanted = {
        options.readme: times,
        options.page: page(found, [path.name for path, _ in files], shown),
    }
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    if options.check:
        for path in stale:
            print(
                f"{path} is not what the results say; run stretto bench document", file=sys.stderr
            )
        return int(bool(stale))
    for path in stale:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(wanted[path])
        print(f"wrote {path}")
    return 0


def _in_order(files: list[tuple[pathlib.Path, Results]]) -> list[tuple[pathlib.Path, Results]]:
    """Those of runs that were begun later come later."""
    return sorted(files, key=lambda pair: (pair[1].start_time, pair[0].name, str(pair[0])))


def _draw(found: list[Results], folder: pathlib.Path) -> None:
    """Writes the pictures of the last machine of most devices, if matplotlib is installed.

    One that was driven by a single process comes first, as in the README's table.
    """
    if not plots.available():
        print("no new pictures: matplotlib is not installed (stretto[plots])", file=sys.stderr)
        return
    machines = [one.machine for one in reversed(found)]
    machine = max(machines, key=lambda one: (one.num_processes == 1, one.num_devices))
    alike = [
        one
        for one in found
        if (one.machine.card, one.machine.layout, one.machine.num_devices, one.machine.driver)
        == (machine.card, machine.layout, machine.num_devices, machine.driver)
    ]
    kept = ("share-", "bandwidth-", "latency-", "scaling", "roofline")
    for path in plots.write_all(results.merged(alike), folder, ("svg",), kept):
        print(f"wrote {path}")


def _relative(path: pathlib.Path, page: pathlib.Path) -> str:
    return os.path.relpath(path, page.parent).replace(os.sep, "/")


def with_times(text: str, times: str, name: str) -> str:
    """`text` with `times` between its markers; BenchmarkError if it lacks one."""
    begin, end = text.find(BEGIN), text.find(END)
    if begin < 0 or end < begin:
        raise BenchmarkError(f"{name} needs a line {BEGIN} and after it a line {END}.")
    return f"{text[: begin + len(BEGIN)]}\n{times}{text[end:]}"


def latest(found: list[Results]) -> list[tuple[Results, Measurement]]:
    """Every case once, from the last file that holds it, with that file."""
    cases: dict[tuple, tuple[Results, Measurement]] = {}
    for one in found:
        for measurement in one.measurements:
            if measurement.timed:
                cases[(one.machine.card, one.machine.layout, *measurement.key)] = (one, measurement)
    return list(cases.values())


def readme_times(found: list[Results]) -> str:
    """The goals' shapes of the fused matmuls on the most devices, and the machine in a sentence.

    Of one type of card, that of the last file which holds any; the page has the others.
    """
    goals = [pair for pair in latest(found) if _is_goal(pair[1])]
    goals = [pair for pair in goals if pair[0].machine.num_processes == 1] or goals
    most = max((measurement.devices for _, measurement in goals), default=0)
    chosen = [pair for pair in goals if pair[1].devices == most]
    cards = [one.machine.card for one in found if any(pair[0] is one for pair in chosen)]
    chosen = [pair for pair in chosen if pair[0].machine.card == cards[-1]]
    chosen.sort(key=lambda pair: _order(pair[1]))
    if not chosen:
        raise BenchmarkError('the results hold no case of the shape set "goals".')
    machines = dict.fromkeys(table.machine_line(one) + _commit(one) for one, _ in chosen)
    return (
        f"Microseconds on {most} devices ({'; '.join(machines)}); in brackets the share of the"
        " floor, which is the larger of the matmul alone and of the bytes to be sent at"
        f" {chosen[0][0].link_gb_per_s:.0f} GB/s.\n\n"
        + markdown.times_table([measurement for _, measurement in chosen], LEFT_OUT)
    )


def _is_goal(measurement: Measurement) -> bool:
    if measurement.kernel not in MATMULS or measurement.type != "bfloat16":
        return False
    goals = shapes_of("goals", measurement.kernel, measurement.devices)
    return any(str(shape) == measurement.shape for shape in goals)


def _order(measurement: Measurement) -> tuple:
    work = measurement.m * max(measurement.k, 1) * measurement.n
    return (KERNELS.index(measurement.kernel), -measurement.devices, work, measurement.key)


def page(found: list[Results], names: list[str], pictures: Sequence[str] = ()) -> str:
    """The whole of docs/performance.md; `pictures` are files, as the page reaches them."""
    parts = ["# Performance\n"]
    if not found:
        return parts[0] + "\nNo results yet: `stretto bench document FILE...` writes this page.\n"
    parts += [
        f"Written by `stretto bench document {' '.join(names)}`; do not edit."
        " [benchmarks.md](benchmarks.md) tells how times are taken and what the columns mean."
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
            parts.append(f"{table.machine_line(one)}; {one.start_time[:10]}{_commit(one)}.\n")
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
    for kernel in KERNELS:
        for devices in sorted({m.devices for m in measurements}, reverse=True):
            cases = [m for m in measurements if m.kernel == kernel and m.devices == devices]
            if cases:
                plural = "device" if devices == 1 else "devices"
                parts.append(f"### `{kernel}`, {devices} {plural}\n")
                parts.append(markdown.kernel_table(cases))
    if limits := markdown.limits_table(measurements):
        parts += ["### What the limit of waits costs (median, p10 to p90)\n", limits]
    if worst := table.never_slower_line(measurements):
        parts += ["### `auto` beside XLA\n", worst + ".\n"]
    parts += _scaling("Strong scaling", strong_efficiencies(measurements, "fused"))
    parts += _scaling("Weak scaling", weak_efficiencies(measurements, "fused"))
    return parts


def _scaling(title: str, found: dict[tuple, dict[int, float]]) -> list[str]:
    """Efficiencies of our kernel per device count; nothing if there is just one count."""
    counts = sorted({count for row in found.values() for count in row})
    if len(counts) < 2:
        return []
    body = []
    for (kernel, m, k, n, dtype), row in found.items():
        shape = f"{m}x{k}x{n}" if k else f"{m}x{n}"
        cells = [table.percent(row.get(count)) or markdown.NONE for count in counts]
        body.append([f"`{kernel}`", shape, dtype, *cells])
    header = ["kernel", "shape on one device", "type", *(str(count) for count in counts)]
    return [f"### {title}, by devices\n", rows(header, body, left=3)]


def _predicted(predictions: Sequence[Prediction], measurements: Sequence[Measurement]) -> list[str]:
    """Predicted times beside the measured ones; nothing if nothing was predicted."""
    if not predictions:
        return []
    measured = {m.key: m for m in measurements}
    body = []
    for one in sorted(predictions, key=lambda p: (KERNELS.index(p.kernel), p.shape, p.devices)):
        real = measured.get(one.key)
        cells = [number(one.fused), microseconds(real and real.of("fused"))]
        cells += [number(one.xla), microseconds(real and real.of("xla"))]
        body.append([f"`{one.kernel}`", one.shape, str(one.devices), *cells])
    header = ["kernel", "shape", "devices", "Stretto, predicted", "measured", "XLA, predicted"]
    return ["### Predicted\n", rows([*header, "measured"], body, left=2)]
