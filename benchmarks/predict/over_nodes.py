"""The committed times over several nodes, and what the model says of them.

Beside every file in `results/nodes/` lies the machine file of its job, with its links as
`stretto bench links` measured them there. The model is fitted to no time over nodes, and what it
says of a case comes from a fit without that case's times within a node.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import re

from stretto.benchmarks.cases import shapes
from stretto.benchmarks.cases.case import Case
from stretto.benchmarks.measurements import nodes
from stretto.benchmarks.measurements.nodes import Entry, NodeResults
from stretto.benchmarks.predict import network
from stretto.benchmarks.predict.calls import call_time
from stretto.benchmarks.predict.model import Model, Predicted
from stretto.benchmarks.predict.samples import results_folder
from stretto.benchmarks.targets import machine_file
from stretto.benchmarks.targets.machine_file import Target
from stretto.kernels.operations import OPERATIONS

ALONE, FLAT, TWO_LEVELS = "matmul alone", "XLA flat", "XLA hierarchical"
SCATTER = 1.15
"""How far the median of a time may lie beyond its tenth percentile, as a factor: 95% of the times
of single nodes stay within it. Beyond it other programs had the devices for many of the samples."""
_OURS = re.compile(r"Stretto, (\d+) pieces")


@dataclasses.dataclass(frozen=True, kw_only=True)
class NodeTime:
    """A version's time of a case over nodes, in microseconds.

    Attributes:
      version: its label: `ALONE`, `FLAT`, `TWO_LEVELS` or "Stretto, N pieces".
      case: operation, sizes, type and devices.
      us, p10: the median, and what a tenth of the samples stay below.
      per_node: devices of the team on one node.
      target: the machine, with its measured links.
      where: the job in words.
    """

    version: str
    case: Case
    us: float
    p10: float
    per_node: int
    target: Target
    where: str

    @property
    def name(self) -> str:
        """The case as the samples within a node name it."""
        shape = shapes.text_of(self.case.sizes)
        return f"{self.case.operation.name} {shape} {self.case.dtype}"

    @property
    def is_disturbed(self) -> bool:
        """Whether its samples scatter by more than `SCATTER`."""
        return self.us > SCATTER * self.p10


def committed() -> list[pathlib.Path]:
    """The files over nodes that Stretto ships; a machine file of the same name lies beside each."""
    return sorted((results_folder() / "nodes").glob("*.json"))


@functools.cache
def times() -> tuple[NodeTime, ...]:
    """Every committed time over nodes, disturbed ones among them."""
    found: list[NodeTime] = []
    for path in committed():
        found += times_of(nodes.read(path), machine_file.read(str(path.with_suffix(".toml"))))
    return tuple(found)


def times_of(found: NodeResults, target: Target) -> list[NodeTime]:
    """The times of a job on a machine.

    Programs of XLA alone that came from a call of Stretto's are the flat version, and no row.
    """
    where = f"{found.machine.card}, {found.nodes} nodes of {found.devices_per_node}"
    rows = []
    for entry in found.results:
        case = _case(entry, found.nodes * found.devices_per_node)
        for label, version in entry.versions.items():
            is_flat = version.backend == "xla"
            if version.median is None or is_flat:
                continue
            row = NodeTime(
                version=label,
                case=case,
                us=version.median,
                p10=version.median if version.p10 is None else version.p10,
                per_node=found.devices_per_node,
                target=target,
                where=f"{where}, {found.network}" if found.network else where,
            )
            rows.append(row)
    return rows


def _case(entry: Entry, devices: int) -> Case:
    operation = OPERATIONS[entry.op]
    sizes = shapes.parse_shape(entry.shape, operation)
    return Case(operation=operation, sizes=sizes, dtype=entry.type, devices=devices)


def predicted(model: Model, one: NodeTime) -> Predicted:
    """What the model says of a time, from a fit that has not seen its case.

    Raises:
      ValueError: a version that is none of those that `across_nodes.py` times.
    """
    model, case, target = model.leaving_out(one.name), one.case, one.target
    if ours := _OURS.fullmatch(one.version):
        pieces = int(ours[1])
        return call_time(model, case, target, "fused", one.per_node, pieces).time
    flat = call_time(model, case, target, "xla", one.per_node)
    if one.version == ALONE:
        return flat.alone
    if one.version == FLAT:
        return flat.time
    if one.version == TWO_LEVELS and (traffic := case.work.traffic) is not None:
        sent = network.in_two_levels(
            model, traffic.collective, traffic.size, case.devices, one.per_node, target
        )
        return flat.alone + sent
    raise ValueError(f"version {one.version!r} of {one.name} has no prediction.")
