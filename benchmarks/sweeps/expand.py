"""From sweeps to their list of cases, each with its peers."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence

from stretto.benchmarks.cases import shapes
from stretto.benchmarks.cases.case import Case
from stretto.benchmarks.errors import BenchmarkError
from stretto.benchmarks.peers.peer import Peer
from stretto.benchmarks.peers.peers import peers_named
from stretto.benchmarks.sweeps.sweep import Sweep
from stretto.kernels.operation import Operation, Sizes


@dataclasses.dataclass(frozen=True)
class Task:
    """One case and the peers to time for it."""

    case: Case
    peers: tuple[Peer, ...]


def expand(
    sweeps: Iterable[Sweep], num_devices: int, on_gpu: bool, rehearse: bool = False
) -> list[Task]:
    """The cases of `sweeps` in order, each once, with the peers of all sweeps that have it.

    With `rehearse` each shape is replaced by a small one, to try a sweep out.

    Raises:
      BenchmarkError: a sweep asks for more devices than there are, or for nothing at all.
    """
    found: dict[tuple, Task] = {}
    for sweep in sweeps:
        peers = tuple(peers_named(sweep.peers))
        for case in _cases(sweep, num_devices, on_gpu):
            if rehearse:
                case = dataclasses.replace(case, sizes=shapes.rehearsed(case.sizes))
            before = found.get(case.key)
            both = peers if before is None else tuple(dict.fromkeys((*before.peers, *peers)))
            found[case.key] = Task(case, both)
    if not found:
        raise BenchmarkError("nothing to measure: the shape sets hold no shape for these kernels.")
    return list(found.values())


def _cases(sweep: Sweep, num_devices: int, on_gpu: bool) -> Iterator[Case]:
    counts = sweep.devices or (_powers_of_two(num_devices) if on_gpu else (num_devices,))
    if max(counts) > num_devices:
        raise BenchmarkError(f"devices={max(counts)} and {num_devices} are present; ask for fewer.")
    texts = sweep.shapes or (("goals",) if on_gpu else ("tiny",))
    for operation in sweep.operations():
        # One that does not communicate is the same on each device: one of them is timed.
        for devices in counts if operation.communicates else (1,):
            for sizes in _sizes(texts, operation, devices):
                grown = shapes.scaled(sizes, devices) if sweep.scaling == "weak" else sizes
                for dtype, values in itertools.product(sweep.dtypes, sweep.values):
                    if values and values not in operation.examples.values:
                        continue
                    yield Case(
                        operation=operation,
                        sizes=grown,
                        dtype=dtype,
                        devices=devices,
                        values=values,
                    )


def _sizes(texts: Sequence[str], operation: Operation, devices: int) -> Iterator[Sizes]:
    """The sizes of every set, and those that are spelt and are an operation's."""
    for text in texts:
        if shapes.suits(text, operation):
            yield from shapes.shapes_of(text, operation, devices)


def _powers_of_two(most: int) -> tuple[int, ...]:
    return tuple(1 << power for power in range(most.bit_length()) if 1 << power <= most)
