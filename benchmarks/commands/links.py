"""`stretto bench links`: latency and bandwidth within nodes and between them."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Annotated

import jax
import msgspec
import tyro
from rich import box
from rich.console import Console
from rich.table import Table
from tyro.conf import arg

from stretto.benchmarks.commands.start import check_outputs, progress, start_devices
from stretto.benchmarks.links import machine_of
from stretto.benchmarks.links.measure import Links, measure
from stretto.benchmarks.pages.terminal import NOT_A_MEASUREMENT, number
from stretto.benchmarks.targets import machine_file


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinkOptions:
    """Measure the links of a job: all pairs of a node's GPUs, and nodes with their neighbours.

    Start it with `stretto run` to measure between nodes. `stretto plan --machine` reads
    the file of `--machine-out`.
    """

    json: bool = False
    """Print JSON in place of a table."""
    machine_out: Annotated[pathlib.Path | None, arg(metavar="FILE")] = None
    """Write a machine file here."""
    within: Annotated[str | None, arg(metavar="FILE")] = None
    """Where every node has one device: a machine file whose links within a node were measured."""


def main(argv: list[str]) -> int:
    """Runs `stretto bench links ARGV`; 0, or a BenchmarkError."""
    options = tyro.cli(LinkOptions, prog="stretto bench links", args=argv)
    within = None if options.within is None else machine_file.read(options.within)
    start_devices()
    check_outputs(("--machine-out", options.machine_out))
    with progress() as say:
        found = measure(say)
    if jax.process_index() != 0:
        return 0
    if options.json:
        print(msgspec.json.encode(found).decode())
    else:
        _print(found)
    if options.machine_out is not None:
        target = machine_of.target_of(found, machine_of.rdma_interfaces(), within)
        machine_file.write(target, options.machine_out)
        if not options.json:
            print(f"wrote {options.machine_out}")
    return 0


def _print(found: Links) -> None:
    console = Console()
    machine = found.machine
    line = f"{found.nodes} x {found.devices_per_node} {machine.card}, {machine.layout}"
    console.print(line, highlight=False)
    if not found.measurement_of_speed:
        console.print(NOT_A_MEASUREMENT, style="bold", highlight=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("link")
    table.add_column("transfer")
    for column in ("latency, us", "GB/s", "both ways, GB/s"):
        table.add_column(column, justify="right")
    both = {(one.link, one.path): one for one in found.links if one.both_ways}
    for one in found.links:
        if one.both_ways:
            continue
        other = both.get((one.link, one.path.replace(" to ", " and ")))
        ways = number(other.gb_per_s) if other is not None else ""
        table.add_row(one.link, one.path, number(one.latency_us), number(one.gb_per_s), ways)
    console.print(table)
