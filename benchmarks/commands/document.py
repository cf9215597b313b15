"""`stretto bench document`: the documented times, made from results files and never by hand."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import sys

import tyro

from stretto.benchmarks import files as texts
from stretto.benchmarks.errors import BenchmarkError
from stretto.benchmarks.measurements import merging, results
from stretto.benchmarks.measurements.results import Results
from stretto.benchmarks.pages import machines, performance, plots, scaled

BEGIN, END = "<!-- times -->", "<!-- /times -->"


@dataclasses.dataclass(frozen=True)
class DocumentOptions:
    """Write the README's table, the performance page and docs/results from results of `--json`.

    The performance page is of one machine: that of the last run, by one process where there is any.

    Where two files hold the same case, the times of the run that was begun later are used; the
    order of the files means nothing.
    """

    files: tyro.conf.Positional[tuple[pathlib.Path, ...]]
    """Results files."""
    readme: pathlib.Path = pathlib.Path("README.md")
    """The file that holds the markers `<!-- times -->` and `<!-- /times -->`."""
    page: pathlib.Path = pathlib.Path("docs/measure/performance.md")
    """The page of one machine to write."""
    machines: pathlib.Path | None = None
    """The folder of a page for each machine; default: `results` beside the page's folder."""
    pictures: pathlib.Path | None = None
    """The folder of the page's pictures; default: `pictures` beside the page."""
    fp8: pathlib.Path | None = None
    """Write only the tables of operands in 8 bits, of one file, into this page between its markers
    `<!-- times -->` and `<!-- /times -->`."""
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
    if options.fp8 is not None:
        return _write({options.fp8: _fp8_page(options.fp8, found)}, check=options.check)
    readme = texts.read_text(options.readme, "see --readme")
    times = between(readme, (BEGIN, END), performance.readme_times(found), str(options.readme))
    folder = options.pictures or options.page.parent / "pictures"
    chosen = _one_machine(found)
    if not options.check:
        _draw(chosen, folder)
    shown = [_relative(path, options.page) for path in sorted(folder.glob("*.svg"))]
    names = [path.name for path, _ in files]
    wanted = {options.readme: times, options.page: performance.page(chosen, names, shown)}
    every = options.machines or options.page.parent.parent / "results"
    wanted |= {every / name: text for name, text in machines.pages(found, names).items()}
    return _write(wanted, check=options.check)


def _fp8_page(page: pathlib.Path, found: list[Results]) -> str:
    if len(found) != 1:
        raise BenchmarkError(f"--fp8 takes the results of one run, and {len(found)} are given.")
    text = texts.read_text(page, "it must have its markers")
    return between(text, (BEGIN, END), f"\n{scaled.tables(found[0])}\n", str(page))


def _write(wanted: dict[pathlib.Path, str], *, check: bool) -> int:
    """Writes the texts that differ from their files; or says which do, and returns 1."""
    stale = [path for path, text in wanted.items() if not texts.holds(path, text)]
    if check:
        for path in stale:
            print(f"{path} does not match the results; run stretto bench document", file=sys.stderr)
        return int(bool(stale))
    for path in stale:
        texts.write_whole(path, wanted[path].encode())
        print(f"wrote {path}")
    return 0


def _in_order(files: list[tuple[pathlib.Path, Results]]) -> list[tuple[pathlib.Path, Results]]:
    """The results in the order in which their runs began."""
    return sorted(files, key=lambda pair: (pair[1].start_time, pair[0].name, str(pair[0])))


def _one_machine(found: list[Results]) -> list[Results]:
    """The results of one machine: that of the last run, of those in one process if there are any.

    Kernels change: a run of fewer devices and today's kernels says more than an older one of more.
    """
    machine = max(found, key=lambda one: (one.machine.num_processes == 1, one.start_time)).machine
    return [
        one
        for one in found
        if (one.machine.card, one.machine.layout, one.machine.num_devices, one.machine.driver)
        == (machine.card, machine.layout, machine.num_devices, machine.driver)
    ]


def _draw(alike: list[Results], folder: pathlib.Path) -> None:
    """Writes the pictures of one machine's results, if matplotlib is installed."""
    if not plots.available():
        print("no new pictures: matplotlib is not installed", file=sys.stderr)
        return
    kept = ("rate-", "bandwidth-", "latency-", "scaling", "share-of-floor", "roofline")
    for path in plots.write_all(merging.merged(alike), folder, ("svg",), kept):
        print(f"wrote {path}")


def _relative(path: pathlib.Path, page: pathlib.Path) -> str:
    return os.path.relpath(path, page.parent).replace(os.sep, "/")


def between(text: str, markers: tuple[str, str], body: str, name: str) -> str:
    """`text`, the file called `name`, with `body` between its markers.

    Raises:
      BenchmarkError: it lacks a marker.
    """
    begin, end = (text.find(marker) for marker in markers)
    if begin < 0 or end < begin:
        raise BenchmarkError(f"{name} needs a line {markers[0]} and after it a line {markers[1]}.")
    return f"{text[: begin + len(markers[0])]}\n{body}{text[end:]}"
