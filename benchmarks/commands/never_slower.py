"""`stretto bench never-slower`: whether `auto` is slower anywhere, at sizes drawn at random."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pathlib
import re
import tempfile
from typing import Annotated

import jax
import tyro
from rich.console import Console
from tyro.conf import arg

from stretto.benchmarks import files
from stretto.benchmarks.cases.shapes import operation_named
from stretto.benchmarks.commands import executing
from stretto.benchmarks.commands.arguments import KERNELS_HELP, split
from stretto.benchmarks.commands.document import between
from stretto.benchmarks.commands.start import check_outputs, start_devices
from stretto.benchmarks.errors import BenchmarkError
from stretto.benchmarks.measurements import merging, results
from stretto.benchmarks.measurements.results import Draw, Results
from stretto.benchmarks.never_slower import candidates, summary
from stretto.benchmarks.never_slower.draw import cases, drawable
from stretto.benchmarks.never_slower.verdicts import is_decided
from stretto.benchmarks.pages import terminal
from stretto.benchmarks.peers.peers import PEERS
from stretto.benchmarks.sweeps.expand import Task
from stretto.benchmarks.sweeps.run import Run
from stretto.benchmarks.sweeps.sweep import DTYPES
from stretto.benchmarks.timing.ahead import Ahead
from stretto.benchmarks.timing.measure import Settings
from stretto.benchmarks.timing.timers import first_process_draws
from stretto.kernels.operations import OPERATIONS

NAME = "stretto bench never-slower"
BEGIN, END = "<!-- never-slower -->", "<!-- /never-slower -->"
WIDTH = 110
RUN_US = 2000.0
"""Microseconds of a run, of which a sample is the mean: shorter than elsewhere, as there are many
programs to look at."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class NeverSlowerOptions:
    """Draw sizes at random, and time `auto` beside XLA and beside random configurations.

    Sizes are a device's, log-uniform, a third of them odd. Cases that do not fit in memory are
    counted separately. The same command with --resume continues. Exits with status 1 if `auto` was
    slower than XLA somewhere: where the 95% interval of the ratio is above 1.02.
    """

    random: int = 200
    """How many cases to draw, over all operations."""
    seed: int = 0
    """Of sizes and configurations; the order of turns differs between runs."""
    json: Annotated[pathlib.Path | None, arg(metavar="FILE")] = None
    """Write results here, after each case."""
    resume: bool = False
    """Continue with the results in the --json file."""
    overwrite: bool = False
    """Drop the results in the --json file."""
    minutes: float | None = None
    """Stop after this many minutes; --resume continues later."""
    kernels: Annotated[str, arg(help=f"Operations, comma separated: {KERNELS_HELP}")] = "all"
    devices: int | None = None
    """How many devices; default: all."""
    dtype: str = "bfloat16"
    """Element type."""
    largest: int = 16384
    """The largest size of a device."""
    candidates: int = 10
    """Configurations that are drawn for each case; 0 for none."""
    repeats: int = 20
    """Samples per program and case at most, two a visit; fewer where 99.9% intervals decide."""
    batch: int = 6
    """Cases whose programs, a dozen each, are compiled together."""
    processes: int = 0
    """Processes that compile kernels for this one; each has half a gigabyte of each GPU's."""
    compiled: Annotated[pathlib.Path | None, arg(metavar="FOLDER")] = None
    """Keep what they compile here, for a run that continues."""
    part: str = "1/1"
    """"2/3" takes the second of three equal parts of the cases, as where each has a process."""
    results: Annotated[tuple[pathlib.Path, ...], arg(metavar="FILE ...")] = ()
    """Time nothing; summarise these results."""
    page: Annotated[pathlib.Path | None, arg(metavar="FILE")] = None
    """Write the summary of the results between the never-slower markers of this page."""
    commit: str = ""
    """The commit to record, where this copy of Stretto is no checkout."""


def main(argv: list[str]) -> int:
    """Runs `stretto bench never-slower ARGV`; 0, 1 if `auto` was slower, 130 if interrupted."""
    options = tyro.cli(NeverSlowerOptions, prog=NAME, args=argv)
    if options.results:
        return _say(options, [results.read(path) for path in options.results])
    _check(options)
    start_devices()
    if options.processes and jax.process_count() > 1:
        raise BenchmarkError("--processes is for a run of one process; leave it out.")
    check_outputs(("--json", options.json))
    draw = draw_of(options, jax.device_count())
    auto, *drawn = candidates.with_kernels(draw)
    peers = [auto, PEERS["xla"], *drawn]
    which, parts = part_of(options.part)
    tasks = [Task(case, tuple(peers)) for case in cases(draw)[which - 1 :: parts]]
    settings = Settings(
        repeats=options.repeats, seed=first_process_draws(), enough=is_decided, run_us=RUN_US
    )
    with contextlib.ExitStack() as stack:
        run = Run(
            options.json,
            resume=options.resume,
            overwrite=options.overwrite,
            command=[*NAME.split(), *argv],
            settings=settings,
            draw=draw,
            batch=options.batch,
            ahead=_ahead(options, draw, stack),
        )
        run.results.machine.commit = run.results.machine.commit or options.commit
        console = Console(width=max(WIDTH, Console().width))
        budget_s = None if options.minutes is None else 60 * options.minutes
        status = executing.execute(run, tasks, None, console, budget_s, NAME)
    if jax.process_index() != 0:
        return status
    run.save()
    return status or _say(options, [run.results])


def _ahead(options: NeverSlowerOptions, draw: Draw, stack: contextlib.ExitStack) -> Ahead | None:
    """The processes that compile, until the `stack` ends; None if the options ask for none."""
    if not options.processes:
        return None
    folder = options.compiled
    if folder is None:
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
    peers = functools.partial(candidates.with_kernels, draw)
    return stack.enter_context(Ahead(peers, options.processes, folder, RUN_US, kind=f"{draw}"))


def draw_of(options: NeverSlowerOptions, devices: int) -> Draw:
    """The draw of the options, for this number of devices.

    Raises:
      BenchmarkError: they name more devices than exist, or an unknown operation.
    """
    if options.devices is not None and not 1 <= options.devices <= devices:
        raise BenchmarkError(f"--devices {options.devices} must be from 1 to {devices}, all here.")
    all_of_them = tuple(name for name, operation in OPERATIONS.items() if drawable(operation))
    names = all_of_them if options.kernels == "all" else split(options.kernels)
    try:
        operations = [operation_named(name) for name in names]
    except ValueError as error:
        raise BenchmarkError(str(error)) from None
    for operation in operations:
        if not drawable(operation):
            raise BenchmarkError(
                f"{operation.name} has sizes {', '.join(operation.sizes)}, and only rows, columns,"
                f" contractions and groups are drawn: take some of {', '.join(all_of_them)}."
            )
    return Draw(
        count=options.random,
        seed=options.seed,
        operations=tuple(operation.name for operation in operations),
        devices=options.devices or devices,
        type=options.dtype,
        largest=options.largest,
        candidates=options.candidates,
    )


def part_of(text: str) -> tuple[int, int]:
    """(which, of how many) of "2/3".

    Raises:
      BenchmarkError: it is no such part.
    """
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    which, parts = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1 <= which <= parts:
        raise BenchmarkError(f"--part {text!r} must be such as 2/3, from 1/3 to 3/3.")
    return which, parts


def _check(options: NeverSlowerOptions) -> None:
    least = {"random": 1, "largest": 8, "repeats": 4, "candidates": 0, "batch": 1, "processes": 0}
    for name, wanted in least.items():
        value = getattr(options, name)
        if value < wanted:
            raise BenchmarkError(f"--{name} {value} must be at least {wanted}.")
    if options.dtype not in DTYPES:
        raise BenchmarkError(f"--dtype {options.dtype!r} is not one of {', '.join(DTYPES)}.")
    if options.compiled is not None and not options.processes:
        raise BenchmarkError("--compiled keeps what --processes N compile; give both.")
    if options.resume and options.json is None:
        raise BenchmarkError("--resume continues a results file; name it with --json.")


def _say(options: NeverSlowerOptions, found: list[Results]) -> int:
    """Prints a summary of the results, and writes it into the page; 1 if `auto` was slower."""
    if any(one.draw is None for one in found):
        raise BenchmarkError(f"these are no results of {NAME}.")
    found = _by_draw(found)
    for one in found:
        if not one.measurement_of_speed:
            print(terminal.NOT_A_MEASUREMENT)
        print(summary.of(one))
    if options.page is not None:
        _write(options.page, found)
    return int(any(summary.slower(one) for one in found))


def _by_draw(found: list[Results]) -> list[Results]:
    """The results of each draw, in one: of parts, or of several loans of a machine."""
    draws = dict.fromkeys(one.draw for one in found)
    return [merging.merged([one for one in found if one.draw == draw]) for draw in draws]


def _write(page: pathlib.Path, found: list[Results]) -> None:
    if not all(one.measurement_of_speed for one in found):
        raise BenchmarkError("results of a CPU are no measurement of speed; no page is written.")
    text = files.read_text(page, "it must have its markers")
    body = "\n".join(summary.of(one) for one in found)
    files.write_whole(page, between(text, (BEGIN, END), body, str(page)).encode())
    print(f"wrote {page}")
