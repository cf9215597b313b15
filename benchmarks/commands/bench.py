"""`stretto bench`: measure, show, compare, document."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import pathlib
import sys
from typing import Annotated

import jax
import tyro
from rich.console import Console
from tyro.conf import Positional, arg

from stretto.benchmarks.cases.case import Case
from stretto.benchmarks.commands import (
    compare,
    document,
    executing,
    links,
    never_slower,
    predicted,
    show,
)
from stretto.benchmarks.commands.arguments import (
    KERNELS_HELP,
    SHAPES_HELP,
    check_least,
    counts_of,
    split,
)
from stretto.benchmarks.commands.start import check_outputs, start_devices
from stretto.benchmarks.errors import BenchmarkError, UnavailableError, first_line
from stretto.benchmarks.measurements.machine import is_gpu
from stretto.benchmarks.pages import plots, report, terminal, timeline
from stretto.benchmarks.peers.peers import PEERS
from stretto.benchmarks.peers.torch_peers import TorchHelper
from stretto.benchmarks.predict import predictions, trace
from stretto.benchmarks.sweeps import plan
from stretto.benchmarks.sweeps.expand import Task, expand
from stretto.benchmarks.sweeps.run import Run
from stretto.benchmarks.sweeps.sweep import Sweep, read_sweeps
from stretto.benchmarks.timing.measure import Settings

WIDTH = 110
_ON_REQUEST = ", ".join(peer.name for peer in PEERS.values() if peer.on_request)
PEERS_HELP = f"Who is timed, comma separated: {', '.join(PEERS)}; default: all but {_ON_REQUEST}."
VERBS = {
    "show": show.main,
    "compare": compare.main,
    "document": document.main,
    "links": links.main,
    "predicted": predicted.main,
    "never-slower": never_slower.main,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Time kernels against everything that could be called in their place, on this machine.

    `stretto bench show FILE...` shows results again, merges them and draws them, `stretto bench
    compare A.json B.json` compares two, `stretto bench document FILE...` writes the documented
    tables from them, `stretto bench links` measures the links between devices, `stretto bench
    predicted` says how well times are predicted, and `stretto bench never-slower` whether `auto`
    is slower at sizes drawn at random.
    """

    kernels: Annotated[
        tuple[str, ...],
        Positional,
        arg(metavar="[KERNEL ...]", help=f"Kernels to time: {KERNELS_HELP}"),
    ] = ()
    shapes: Annotated[str, arg(help=SHAPES_HELP)] = ""
    devices: str = ""
    """Device counts, comma separated; default: powers of two up to all, on a CPU all."""
    dtypes: str = "bfloat16"
    """Element types, comma separated: bfloat16, float16, float32."""
    peers: Annotated[str, arg(help=PEERS_HELP)] = ""
    values: str = ""
    """How operands are drawn, comma separated: `usual`, of experts `zipf`, of operands in 8 bits
    `tensor` (one scale each); default: `usual`."""
    scaling: str = ""
    """`weak` multiplies the rows by the device count; `strong` keeps the problem."""
    config: Annotated[pathlib.Path | None, arg(metavar="FILE")] = None
    """A sweep file such as configs/bench/h100.toml, in place of the options above."""
    json: Annotated[pathlib.Path | None, arg(metavar="FILE")] = None
    """Write results here, after each case."""
    resume: bool = False
    """Continue with the results in the --json file."""
    overwrite: bool = False
    """Drop the results in the --json file."""
    plot: Annotated[pathlib.Path | None, arg(metavar="FOLDER")] = None
    """Write pictures into this folder (needs matplotlib)."""
    report: Annotated[pathlib.Path | None, arg(metavar="FILE")] = None
    """Write one self-contained HTML page."""
    trace: Annotated[pathlib.Path | None, arg(metavar="FILE")] = None
    """Time nothing; write the timeline of one call of the first case here, for Perfetto."""
    repeats: int = 20
    """Samples per peer and case; each is the mean over a run of many calls."""
    rest_s: float = 0.005
    """Seconds of idle after each visit of a peer; after more, fewer are at the power limit."""
    budget: Annotated[float | None, arg(metavar="SECONDS")] = None
    """Stop after this many seconds; --resume continues later."""
    rehearse: bool = False
    """Try the sweep out: the same cases and peers with small shapes, no measurement of speed."""
    list: bool = False
    """Time nothing; list the cases and how long they would take."""
    max_slowdown: Annotated[float | None, arg(metavar="PERCENT")] = None
    """Exit with status 1 if the interval of `auto` over XLA is beyond this many percent."""
    link_gb_per_s: float = 350.0
    """Bandwidth of a device's links that the floor assumes, in GB/s."""
    predict: str = ""
    """Device counts to predict times for, comma separated, beside those that are measured."""
    torch: bool = True
    """Time PyTorch's peers as well, in a helper process, where it is installed."""
    torch_python: Annotated[pathlib.Path | None, arg(metavar="FILE")] = None
    """The interpreter that has PyTorch, if it is not this one."""
    check: bool = True
    """Compare Stretto's results with XLA's before timing them."""
    seed: int = 0
    """Seed of the operands' values and of the order of the peers."""
    commit: str = ""
    """The commit to record, where this copy of Stretto is no checkout."""


def main(argv: list[str]) -> int:
    """Runs `stretto bench ARGV` and returns the exit status.

    0 if all went well, 1 on a regression or lost devices, 2 on misuse, 130 if interrupted.
    """
    try:
        if argv and argv[0] in VERBS:
            return VERBS[argv[0]](argv[1:])
        options = tyro.cli(BenchOptions, prog="stretto bench", args=argv)
        return _bench(options, argv)
    except BenchmarkError as error:
        print(f"stretto bench: {error}", file=sys.stderr)
        return 2


def _bench(options: BenchOptions, argv: list[str]) -> int:
    sweeps = sweeps_of(options)
    _check(options)
    start_devices()
    check_outputs(
        ("--json", options.json), ("--report", options.report), ("--trace", options.trace)
    )
    if options.plot is not None:
        check_outputs(("--plot", options.plot / "picture.svg"))
    on_gpu = is_gpu(jax.devices()[0].platform)
    tasks = expand(sweeps, jax.device_count(), on_gpu, options.rehearse)
    if options.trace is not None:
        return _trace([item.case for item in tasks], options.trace)
    settings = Settings(
        repeats=options.repeats,
        rest_s=options.rest_s,
        seed=options.seed,
        check=options.check,
        link_gb_per_s=options.link_gb_per_s,
    )
    if options.list:
        return _list(tasks, settings)
    run = Run(
        options.json,
        resume=options.resume,
        overwrite=options.overwrite,
        command=["stretto", "bench", *argv],
        settings=settings,
        rehearsal=options.rehearse,
    )
    run.results.machine.commit = run.results.machine.commit or options.commit
    console = Console(width=max(WIDTH, Console().width))
    first = jax.process_index() == 0
    if first:
        _introduce(console, run)
    status = _execute(run, tasks, options, console)
    if not first:
        return status
    _predict(run, tasks, options, console)
    if worst := terminal.never_slower_line(run.results.measurements):
        console.print(worst, highlight=False)
    _pictures(run, options)
    return status or _slowdown_status(run, options)


def _list(tasks: list[Task], settings: Settings) -> int:
    """Prints the cases, each with the seconds that it would take on GPUs."""
    each = [plan.seconds(item.case, item.peers, settings) for item in tasks]
    for item, seconds in zip(tasks, each, strict=True):
        print(f"{seconds:5.1f} s  {item.case}: {', '.join(peer.name for peer in item.peers)}")
    print(plan.words(plan.START_S + sum(each), len(tasks)))
    return 0


def _trace(cases: list[Case], path: pathlib.Path) -> int:
    """Records the first case over several devices, and draws one block where it can."""
    case = next((case for case in cases if case.needs_kernel), None)
    if case is None:
        raise BenchmarkError("a timeline needs a case over several devices; see --devices.")
    try:
        about = trace.record(case, path)
    except (UnavailableError, ValueError, NotImplementedError) as error:
        raise BenchmarkError(f"{case} has no timeline: {first_line(error)}") from None
    print(f"wrote {path}: {case}, {about}; open it at https://ui.perfetto.dev")
    if plots.available():
        picture = path.with_suffix(".svg")
        timeline.write(path, picture)
        print(f"wrote {picture}: one block of it")
    return 0


def sweeps_of(options: BenchOptions) -> tuple[Sweep, ...]:
    """The sweeps of the options, checked; BenchmarkError names what is wrong with them."""
    if options.config is not None:
        if options.kernels or options.shapes or options.devices:
            raise BenchmarkError(
                "--config holds kernels, shapes and devices; give one or the other."
            )
        return read_sweeps(options.config)
    if not options.kernels:
        raise BenchmarkError("no kernel; name some, `all`, or a --config file.")
    sweep = Sweep(
        kernels=() if "all" in options.kernels else options.kernels,
        shapes=split(options.shapes),
        devices=counts_of(options.devices),
        dtypes=split(options.dtypes),
        peers=split(options.peers),
        scaling=options.scaling,
        values=tuple("" if name == "usual" else name for name in split(options.values)) or ("",),
    )
    sweep.check()
    return (sweep,)


def _check(options: BenchOptions) -> None:
    """Raises an error before hours of measuring if an option cannot be served."""
    check_least("--repeats", options.repeats, 1)
    check_least("--seed", options.seed, 0)
    check_least("--budget", options.budget, 0)
    check_least("--max-slowdown", options.max_slowdown, -100)
    if not 0 <= options.rest_s < math.inf:
        raise BenchmarkError(f"--rest-s {options.rest_s:g} must be a number of seconds from 0 on.")
    if not 0 < options.link_gb_per_s < math.inf:
        raise BenchmarkError(f"--link-gb-per-s {options.link_gb_per_s:g} must be more than 0.")
    predictions.check_counts(counts_of(options.predict))
    if options.plot is not None:
        plots.check_available()


def _introduce(console: Console, run: Run) -> None:
    console.print(terminal.machine_line(run.results), highlight=False)
    if not run.results.measurement_of_speed:
        console.print(terminal.NOT_A_MEASUREMENT, style="bold", highlight=False)
    console.print()


def _execute(run: Run, tasks: list[Task], options: BenchOptions, console: Console) -> int:
    helper = _helper(options)
    if helper is not None and (item := next(filter(_is_torchs, tasks), None)) is not None:
        # Importing PyTorch takes as long as compiling the first programs: both at once.
        helper.start(item.case.devices)
    with contextlib.closing(helper) if helper else contextlib.nullcontext():
        return executing.execute(run, tasks, helper, console, options.budget, "stretto bench")


def _is_torchs(item: Task) -> bool:
    return any(peer.candidates is None for peer in item.peers)


def _helper(options: BenchOptions) -> TorchHelper | None:
    """PyTorch's helper, where all devices belong to this process and it is wanted."""
    if not options.torch or jax.process_count() > 1:
        return None
    python = None if options.torch_python is None else str(options.torch_python)
    return TorchHelper(python, is_gpu(jax.devices()[0].platform))


def _predict(run: Run, tasks: list[Task], options: BenchOptions, console: Console) -> None:
    if not options.predict:
        return
    cases = {item.case.key[:-1]: item for item in tasks}
    counts = sorted({*counts_of(options.predict), *(item.case.devices for item in tasks)})
    wanted = [
        dataclasses.replace(item.case, devices=count)
        for item in cases.values()
        for count in counts
        if count > 1 and item.case.operation.communicates
    ]
    run.results.predictions = predictions.predict_all(wanted, run.results.machine.card)
    terminal.print_predictions(console, run.results.predictions, run.results.measurements)
    run.save()


def _pictures(run: Run, options: BenchOptions) -> None:
    if options.plot is not None:
        plots.write_all(run.results, options.plot)
    if options.report is not None:
        report.write(run.results, options.report)


def _slowdown_status(run: Run, options: BenchOptions) -> int:
    if options.max_slowdown is None:
        return 0
    timed = [auto for one in run.results.measurements if (auto := one.of("auto")) is not None]
    # Where there were too few rounds for an interval, the ratio itself counts.
    lowest = [one.intervals.get("over_xla", (one.over_xla or 0.0,))[0] for one in timed]
    return int(max(lowest, default=0.0) > 1 + options.max_slowdown / 100)
