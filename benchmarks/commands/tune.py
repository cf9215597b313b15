"""`stretto tune`: fills the table from which `backend="auto"` chooses."""

from __future__ import annotations

import dataclasses
import pathlib
import sys
import time
from collections.abc import Iterator
from typing import Annotated

import jax
import tyro
from rich.console import Console
from tyro.conf import Positional, arg

from stretto.benchmarks.cases.case import Case
from stretto.benchmarks.commands.arguments import (
    KERNELS_HELP,
    SHAPES_HELP,
    check_least,
    counts_of,
    split,
)
from stretto.benchmarks.commands.start import check_outputs, progress, start_devices
from stretto.benchmarks.errors import BenchmarkError, UnavailableError, first_line
from stretto.benchmarks.measurements import machine, merging, results, tuned_file
from stretto.benchmarks.pages import terminal
from stretto.benchmarks.sweeps.expand import expand
from stretto.benchmarks.sweeps.sweep import Sweep
from stretto.benchmarks.timing.compiling import Compiler
from stretto.benchmarks.timing.measure import Settings
from stretto.benchmarks.timing.timers import agreed
from stretto.benchmarks.timing.tune import Prepared, configs_for, prepare, take
from stretto.kernels.choice import tables
from stretto.kernels.choice.tables import Entry, Table, TableError
from stretto.kernels.problem.machine import Machine

BATCH = 8
"""Cases whose configurations are compiled together."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """Measure kernels' configurations on the present GPUs and keep the fastest per shape.

    Shapes that the table holds already are not measured again, so the same command continues a run
    that was interrupted.
    """

    kernels: Annotated[
        tuple[str, ...],
        Positional,
        arg(metavar="[KERNEL ...]", help=f"Kernels to tune: {KERNELS_HELP}"),
    ] = ()
    results: Annotated[tuple[pathlib.Path, ...], arg(metavar="FILE ...")] = ()
    """Measure nothing; take times and configurations from these results of `stretto bench`."""
    shapes: Annotated[str, arg(help=SHAPES_HELP)] = "goals,llama-70b,square"
    devices: str = ""
    """Device counts, comma separated; default: powers of two up to all, on a CPU all."""
    dtypes: str = "bfloat16"
    """Element types, comma separated."""
    output: Annotated[pathlib.Path | None, arg(metavar="FILE")] = None
    """The table; default: the package's own, for this type of GPU."""
    retune: bool = False
    """Measure shapes that the table holds already."""
    candidates: Annotated[int | None, arg(metavar="COUNT")] = None
    """Measure only the first COUNT configurations; default: all of the kernel's."""
    repeats: int = 10
    """Samples per finalist."""
    budget: Annotated[float | None, arg(metavar="SECONDS")] = None
    """Stop after this many seconds."""
    seed: int = 0
    """Seed of the operands' values."""


def main(argv: list[str]) -> int:
    """Runs `stretto tune ARGV` and returns the exit status: 0, or 2 on misuse."""
    try:
        return _tune(tyro.cli(TuneOptions, prog="stretto tune", args=argv))
    except BenchmarkError as error:
        print(f"stretto tune: {error}", file=sys.stderr)
        return 2


def _tune(options: TuneOptions) -> int:
    if options.results:
        return _from_results(options)
    check_least("--repeats", options.repeats, 1)
    check_least("--candidates", options.candidates, 1)
    check_least("--seed", options.seed, 0)
    check_least("--budget", options.budget, 0)
    sweep = sweep_of(options)
    start_devices()
    on_gpu = machine.is_gpu(jax.devices()[0].platform)
    path = options.output or _own_table(on_gpu)
    found = _existing(path, jax.devices()[0].device_kind)
    check_outputs(("--output", path))
    console = Console()
    if not on_gpu:
        console.print(terminal.NOT_A_MEASUREMENT, style="bold", highlight=False)
    cases = [item.case for item in expand([sweep], jax.device_count(), on_gpu)]
    todo = [
        case for case in cases if case.needs_kernel and (options.retune or not _held(found, case))
    ]
    _say(console, f"{len(todo)} of {len(cases)} cases to tune, into {path}")
    began = time.monotonic()
    with progress() as say:
        while todo:
            passed = options.budget is not None and time.monotonic() - began > options.budget
            if agreed(passed):
                _say(console, "The time limit has passed; the same command continues from here.")
                break
            batch, todo = todo[:BATCH], todo[BATCH:]
            for entry in _batch(batch, options, on_gpu, say, console):
                found = tuned_file.merged(found, entry)
                if jax.process_index() == 0:
                    tuned_file.write(found, path)
    return 0


def _from_results(options: TuneOptions) -> int:
    """Fills the table from what `stretto bench` measured."""
    measured = merging.merged([results.read(path) for path in options.results])
    if not measured.measurement_of_speed and options.output is None:
        raise BenchmarkError("they are no measurement of speed; to try it out, give --output FILE.")
    kind = measured.machine.card
    path = options.output or tables.folder() / tables.file_name(kind)
    found = _existing(path, kind)
    taken = [
        entry
        for entry in tuned_file.entries_of(measured)
        if not options.kernels or {"all", entry.op} & set(options.kernels)
    ]
    if not options.retune:
        held = {entry.key for entry in found.entries}
        taken = [entry for entry in taken if entry.key not in held]
    for entry in taken:
        found = tuned_file.merged(found, entry)
    tuned_file.write(found, path)
    print(f"{len(taken)} entries taken over into {path}, which now has {len(found.entries)}")
    return 0


def _batch(cases, options, on_gpu, say, console) -> Iterator[Entry]:
    """Compiles the configurations of all `cases` at once, then tunes one after another."""
    settings = Settings(repeats=options.repeats, seed=options.seed)
    versions = machine.versions()
    backend = "pallas" if on_gpu else "auto"
    with Compiler() as compiler:
        waiting: list[Prepared] = []
        for case in cases:
            say(f"tracing {case}")
            try:
                configs = configs_for(case, Machine.of_mesh())[: options.candidates]
            except UnavailableError as error:
                _say(console, f"{case}: skipped, {error}")
                continue
            waiting.append(prepare(case, configs, settings, compiler, backend=backend))
        say(f"compiling {len(cases)} cases")
        compiler.wait()
        while waiting:
            # Taken out of the list, so that its operands are freed when it is done.
            entry = _one(waiting.pop(0), settings, versions, say, console)
            if entry is not None:
                yield entry


def _one(prepared: Prepared, settings, versions, say, console) -> Entry | None:
    """Tunes one case and prints the result."""
    case = prepared.case
    try:
        entry = take(prepared, settings, versions, lambda text: say(f"{case}: {text}"))
    except UnavailableError as error:
        _say(console, f"{case}: skipped, {first_line(error)}")
        return None
    _say(
        console,
        f"{case}: {terminal.number(entry.fused_us)} us, XLA {terminal.number(entry.xla_us)} us"
        f" ({entry.ratio:.2f}), {dict(entry.config)}",
    )
    return entry


def sweep_of(options: TuneOptions) -> Sweep:
    """The cases of the options, checked; BenchmarkError names what is wrong."""
    if not options.kernels:
        raise BenchmarkError("no kernel; name some, or `all`.")
    sweep = Sweep(
        kernels=() if "all" in options.kernels else options.kernels,
        shapes=split(options.shapes),
        devices=counts_of(options.devices),
        dtypes=split(options.dtypes),
    )
    sweep.check()
    return sweep


def _own_table(on_gpu: bool) -> pathlib.Path:
    if not on_gpu:
        raise BenchmarkError("there are no GPUs to tune for; to try it out, give --output FILE.")
    return tables.folder() / tables.file_name(jax.devices()[0].device_kind)


def _existing(path: pathlib.Path, kind: str) -> Table:
    """The table in `path`, or an empty one; only the first process reads it."""
    if jax.process_index() != 0 or not path.exists():
        return Table(kind)
    try:
        found = tables.read(path)
    except TableError as error:
        raise BenchmarkError(f"{error}; remove it, or give another --output.") from None
    if found.device_kind != kind:
        raise BenchmarkError(
            f"{path} is for {found.device_kind!r}, the devices are {kind!r}; give another --output."
        )
    return found


def _held(found: Table, case: Case) -> bool:
    key = tuned_file.entry_of(case, {}, 0.0, 0.0, {}).key
    return any(entry.key == key for entry in found.entries)


def _say(console: Console, text: str) -> None:
    if jax.process_index() == 0:
        console.print(text, highlight=False, markup=False, soft_wrap=True)
