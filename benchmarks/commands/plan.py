"""`stretto plan`: predicts a training step, or calls of operations, on larger machines."""

from __future__ import annotations

import dataclasses
import math
import pathlib
import sys
from typing import Annotated

import msgspec
import tyro
from rich.console import Console
from tyro.conf import Positional, arg

from stretto.benchmarks.errors import BenchmarkError
from stretto.benchmarks.pages import plan_picture, plans, plots
from stretto.benchmarks.scaling import decoder, listed, plan
from stretto.benchmarks.scaling.planned import CallsPlan, Plan
from stretto.benchmarks.targets import machine_file

WIDTH = 120
MOST_GPUS = 65_536


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Plan a training step on many GPUs: the fastest splits, their memory, and how it scales.

    Times come from a model fitted to measurements on 1, 2 and 4 GPUs. Every time has an
    interval, and names what goes beyond the measurements. Nothing runs, and no GPU is needed.
    """

    model: Annotated[
        str,
        Positional,
        arg(
            metavar="MODEL",
            help=f"{', '.join(decoder.names())}, a file such as those of configs/models/, or a"
            " file of calls: [[call]] with operation and shape.",
        ),
    ]
    gpus: str = "8..1024"
    """Numbers of GPUs, comma separated; 8..1024 are 8, 16, 32 and so on."""
    machine: Annotated[
        str,
        arg(
            metavar="FILE",
            help=f"{', '.join(machine_file.names())}, or a file that `stretto bench links"
            " --machine-out` wrote.",
        ),
    ] = "dgx-h100"
    batch: int | None = None
    """Sequences of a step over all GPUs, for strong scaling; by default the model's."""
    sequence: int | None = None
    """Tokens of a sequence; by default the model's."""
    json: bool = False
    """Print JSON in place of tables."""
    picture: Annotated[pathlib.Path | None, arg(metavar="FILE")] = None
    """Draw the scaling (needs matplotlib); svg or png."""


def main(argv: list[str]) -> int:
    """Runs `stretto plan ARGV`; 0, or 2 on misuse."""
    options = tyro.cli(PlanOptions, prog="stretto plan", args=argv)
    try:
        return _plan(options)
    except BenchmarkError as error:
        print(f"stretto plan: {error}", file=sys.stderr)
        return 2


def _plan(options: PlanOptions) -> int:
    counts = gpu_counts(options.gpus)
    target = machine_file.read(options.machine)
    machine_file.card_of(target, options.machine)
    if max(counts) > target.gpus_per_node and target.between is None:
        raise BenchmarkError(
            f"--machine {options.machine}: it has no [between], so that there is one node of"
            f" {target.gpus_per_node} GPUs; add gb_per_s and latency_us, or ask for fewer."
        )
    if options.picture is not None:
        plots.check_picture("--picture", options.picture)
    path = pathlib.Path(options.model)
    if options.model not in decoder.names() and listed.is_list(path):
        if options.picture is not None:
            raise BenchmarkError("--picture draws how a model scales; leave it out for calls.")
        found: Plan | CallsPlan = listed.plan(listed.read(path), counts, target)
    else:
        found = _plan_of_model(options, counts, target)
    if options.json:
        print(msgspec.json.format(msgspec.json.encode(found), indent=1).decode())
    else:
        console = Console(width=max(WIDTH, Console().width))
        if isinstance(found, Plan):
            plans.print_plan(console, found)
        else:
            plans.print_calls(console, found)
    if options.picture is not None and isinstance(found, Plan):
        if not any(one.best for one in found.splits):
            raise BenchmarkError(
                f"--picture {options.picture} is not drawn, since no split fits; ask for more GPUs."
            )
        plan_picture.write(found, options.picture)
        print(f"wrote {options.picture}", file=sys.stderr)
    return 0


def _plan_of_model(options: PlanOptions, counts: list[int], target: machine_file.Target) -> Plan:
    model = decoder.read(options.model)
    for name, value in (("batch", options.batch), ("sequence", options.sequence)):
        if value is not None and value < 1:
            raise BenchmarkError(f"--{name} {value} must be at least 1.")
    if options.sequence is not None:
        model = msgspec.structs.replace(model, sequence=options.sequence)
    return plan.plan(model, counts, target, options.batch or model.batch)


def gpu_counts(text: str) -> list[int]:
    """The numbers of GPUs that `--gpus` names, in order.

    Raises:
      BenchmarkError: it names none, or what is no number from 1 to `MOST_GPUS`.
    """
    counts: set[int] = set()
    for word in filter(None, (word.strip() for word in text.split(","))):
        first, dots, last = word.partition("..")
        if not first.isdecimal() or (dots and not last.isdecimal()):
            raise BenchmarkError(f"--gpus {text!r} is not like 8,64 or 8..1024.")
        ends = int(first), int(last if dots else first)
        if not 1 <= ends[0] <= ends[1] <= MOST_GPUS:
            raise BenchmarkError(
                f"--gpus {word} must be from 1 to {MOST_GPUS}, the smaller number first."
            )
        doublings = int(math.log2(ends[1] / ends[0])) if dots else 0
        counts.update(ends[0] << power for power in range(doublings + 1))
    if not counts:
        raise BenchmarkError("--gpus names no number; pass one such as 8, or 8..1024.")
    return sorted(counts)
