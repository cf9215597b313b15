"""`stretto bench show`: tables, pictures and a report from results files, on any machine."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Annotated

import tyro
from rich.console import Console
from tyro.conf import Positional, arg

from stretto.benchmarks.commands.arguments import counts_of
from stretto.benchmarks.errors import BenchmarkError
from stretto.benchmarks.measurements import merging, results
from stretto.benchmarks.pages import plots, report, terminal
from stretto.benchmarks.predict import predictions

WIDTH = 110


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShowOptions:
    """Show results of `stretto bench --json`, or make files of them; needs no GPU.

    Several files of one machine are taken together, of however many of its devices; where two hold
    the same case, the times of the one that is named later are used.
    """

    files: Annotated[tuple[pathlib.Path, ...], Positional, arg(metavar="FILE [FILE ...]")]
    """Results files."""
    merge: Annotated[pathlib.Path | None, arg(metavar="FILE")] = None
    """Write the results of all files into this one."""
    plot: Annotated[pathlib.Path | None, arg(metavar="FOLDER")] = None
    """Write pictures into this folder (needs matplotlib)."""
    report: Annotated[pathlib.Path | None, arg(metavar="FILE")] = None
    """Write one self-contained HTML page."""
    predict: str = ""
    """Device counts, comma separated, on which to predict the documented shapes."""


def main(argv: list[str]) -> int:
    """Runs `stretto bench show ARGV`; 0, or a BenchmarkError."""
    options = tyro.cli(ShowOptions, prog="stretto bench show", args=argv)
    if not options.files:
        raise BenchmarkError("no results; name files that --json wrote.")
    if options.plot is not None:
        plots.check_available()
    counts = counts_of(options.predict)
    predictions.check_counts(counts)
    read = [results.read(path) for path in options.files]
    found = merging.merged(read)
    if counts:
        _predict(found, counts)
    written = _write(found, options)
    for path in written:
        print(f"wrote {path}")
    if not written:
        _print(found, list(dict.fromkeys(terminal.machine_line(one) for one in read)))
    return 0


def _predict(found: results.Results, counts: tuple[int, ...]) -> None:
    """Adds predictions, in place of earlier ones of the same cases."""
    new = predictions.predict_goals(found.measurements, counts, found.machine.card)
    kept = {prediction.key: prediction for prediction in (*found.predictions, *new)}
    found.predictions = list(kept.values())


def _write(found: results.Results, options: ShowOptions) -> list[pathlib.Path]:
    written = []
    if options.merge is not None:
        results.write(found, options.merge)
        written.append(options.merge)
    if options.plot is not None:
        written += plots.write_all(found, options.plot)
    if options.report is not None:
        report.write(found, options.report)
        written.append(options.report)
    return written


def _print(found: results.Results, machines: list[str]) -> None:
    console = Console(width=max(WIDTH, Console().width))
    for line in machines:
        console.print(line, highlight=False)
    if not found.measurement_of_speed:
        console.print(terminal.NOT_A_MEASUREMENT, style="bold", highlight=False)
    console.print()
    for measurement in found.measurements:
        terminal.print_measurement(console, measurement, found.machine.platform)
    if found.predictions:
        terminal.print_predictions(console, found.predictions, found.measurements)
    if worst := terminal.never_slower_line(found.measurements):
        console.print(worst, highlight=False)
