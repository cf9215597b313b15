"""Times of the operations over several nodes, beside XLA's flat and hierarchical versions.

    stretto run -n 4 --processes-per 2 benchmarks/across_nodes.py --json across.json

takes the halves of one host for two nodes; on real nodes leave `--processes-per` out. They are
timed as `stretto bench` times its peers. On CPUs it is a rehearsal, small and by XLA alone: its
times say nothing.
"""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from collections.abc import Sequence

import jax
import tyro

import stretto.launch
from stretto.benchmarks import files
from stretto.benchmarks.cases.case import Case
from stretto.benchmarks.cases.meshes import GPU, mesh_of_nodes
from stretto.benchmarks.commands.arguments import counts_of, split
from stretto.benchmarks.errors import BenchmarkError, UnavailableError
from stretto.benchmarks.measurements import machine
from stretto.benchmarks.measurements.nodes import SCHEMA, Entry, NodeResults, Version, encode
from stretto.benchmarks.measurements.results import Measurement
from stretto.benchmarks.peers.across_nodes import peers_across_nodes
from stretto.benchmarks.peers.peer import Peer
from stretto.benchmarks.sweeps.expand import expand
from stretto.benchmarks.sweeps.sweep import Sweep
from stretto.benchmarks.timing.measure import Settings, measure
from stretto.benchmarks.timing.timers import SAMPLES_PER_VISIT
from stretto.distributed import settings
from stretto.kernels.operations import OPERATIONS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Time the operations over several nodes, inside one program."""

    operations: str = ",".join(
        name for name, operation in OPERATIONS.items() if operation.between_nodes is not None
    )
    """Which, comma separated."""
    shapes: str = ""
    """Sizes such as 8192x8192x8192 (for matmuls) and 8192x8192 (for the others), and sets of
    `stretto bench`, comma separated; default: the set `nodes`, on CPUs `tiny`."""
    nodes: int = 2
    """Equal shares of the job's devices that count as nodes."""
    rounds: int | None = None
    """How often each version is timed, in turns; each time two samples. Default: 16, 1 on CPUs."""
    pieces: str = "1,2,4"
    """Numbers of pieces in which Stretto sends between nodes, comma separated."""
    backend: str = ""
    """Stretto's backend: "pallas", "xla" or "simulator"; default: pallas, xla on CPUs."""
    json: pathlib.Path | None = None
    """Where to write the results."""


def main(options: Options) -> None:
    """Times all that `options` say; process 0 prints and writes.

    Raises:
      BenchmarkError: an operation, a shape or a number of pieces that cannot be.
      ValueError: a number of nodes that does not divide the devices.
    """
    process = stretto.launch.initialize()
    mesh = mesh_of_nodes(options.nodes)
    on_gpu = machine.is_gpu(jax.default_backend())
    cases = cases_of(options, mesh.size, on_gpu)
    backend = options.backend or ("pallas" if on_gpu else "xla")
    peers = peers_across_nodes(backend, counts_of(options.pieces))
    how = Settings(repeats=(options.rounds or (16 if on_gpu else 1)) * SAMPLES_PER_VISIT)
    found = NodeResults(
        schema=SCHEMA,
        machine=machine.describe(),
        nodes=options.nodes,
        devices_per_node=mesh.shape[GPU],
        unit="us",
        results=[],
    )
    with settings.nodes_of(mesh.shape[GPU]):
        for case in cases:
            found.results.append(entry_of(measure(case, peers, how, None, mesh), peers))
            if process.process_id == 0:
                print(describe(found.results[-1]), flush=True)
                if options.json is not None:  # At once: a job may be ended before its last case.
                    files.write_whole(options.json, encode(found))


def cases_of(options: Options, devices: int, on_gpu: bool) -> list[Case]:
    """All that is timed, in order.

    Raises:
      BenchmarkError: an unknown operation, a text that is no shape, a shape that no operation
        takes, or one that does not divide among the devices.
    """
    sweep = Sweep(
        kernels=split(options.operations),
        shapes=split(options.shapes or ("nodes" if on_gpu else "tiny")),
        devices=(devices,),
    )
    sweep.check()
    cases = [task.case for task in expand([sweep], devices, on_gpu)]
    for case in cases:
        try:
            case.check()
        except UnavailableError as error:
            raise BenchmarkError(f"{case}: {error}; pass another shape.") from None
    return cases


def entry_of(measurement: Measurement, peers: Sequence[Peer]) -> Entry:
    """What was found of one operation at one shape, by the peers' labels."""
    reasons = {missing.peer: missing.reason for missing in measurement.missing}
    versions: dict[str, Version] = {}
    for peer in peers:
        timed = measurement.of(peer.name)
        if timed is not None:
            versions[peer.label] = Version(
                median=timed.time,
                p10=timed.time_p10,
                p90=timed.time_p90,
                difference=timed.relative_error,
                backend=timed.backend,
            )
        elif measurement.skipped or peer.name in reasons:
            versions[peer.label] = Version(error=measurement.skipped or reasons[peer.name])
    return Entry(
        op=measurement.kernel, shape=measurement.shape, type=measurement.type, versions=versions
    )


def describe(entry: Entry) -> str:
    """One line for an operation at one shape."""
    parts = [
        f"{name}: {found.error}" if found.median is None else f"{name} {found.median:.0f}"
        for name, found in entry.versions.items()
    ]
    return f"{entry.op} {entry.shape} (us): {', '.join(parts)}"


if __name__ == "__main__":
    try:
        main(tyro.cli(Options, args=sys.argv[1:]))
    except (BenchmarkError, ValueError) as mistake:
        sys.exit(f"across_nodes.py: {mistake}")
