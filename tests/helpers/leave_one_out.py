"""How well a tuned table tells the ratio of an entry that is left out of it.

`python tests/helpers/leave_one_out.py` prints it of the tables that come with Stretto.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np

from stretto.kernels.choice import speed, tables, transfers
from stretto.kernels.choice.by_table import Estimate, ratio_between
from stretto.kernels.choice.tables import Entry, Table
from stretto.kernels.operations import KNOWN
from stretto.kernels.problem.machine import Machine
from stretto.kernels.problem.problem import Problem, Types


@dataclasses.dataclass
class LeftOut:
    """Errors of the logarithms of ratios, and what wrong choices cost, as logarithms, in all."""

    errors: list[float] = dataclasses.field(default_factory=list)
    regret: float = 0.0
    wrong: int = 0

    def add(self, told: float, measured: float) -> None:
        self.errors.append(abs(math.log(told / measured)))
        if (told <= 1) != (measured <= 1):
            self.wrong += 1
            self.regret += abs(math.log(measured))

    @property
    def mean_error(self) -> float:
        return float(np.mean(self.errors))

    @property
    def root_mean_square(self) -> float:
        return float(np.sqrt(np.mean(np.square(self.errors))))

    def __str__(self) -> str:
        return (
            f"{len(self.errors)} entries, mean error {100 * self.mean_error:.1f}%, root mean square"
            f" {100 * self.root_mean_square:.1f}%, {self.wrong} wrong choices, which cost"
            f" {100 * self.regret:.0f}% together"
        )


def left_out(table: Table) -> tuple[LeftOut, LeftOut]:
    """By several neighbours, and by the nearest alone; of all entries that have a neighbour."""
    several, nearest = LeftOut(), LeftOut()
    for entry in table.entries:
        problem = _problem(entry, table.device_kind)
        others = tuple(other for other in table.entries if other is not entry)
        near = Table(table.device_kind, others).near(problem)
        if near:
            several.add(ratio_between(near, problem, _estimate(problem)), entry.ratio)
            nearest.add(near[0][1].ratio, entry.ratio)
    return several, nearest


def _problem(entry: Entry, kind: str) -> Problem:
    return Problem(
        operation=entry.op,
        sizes=entry.sizes,
        types=Types(lhs=entry.dtype, rhs=entry.dtype, out=entry.dtype),
        devices=entry.devices,
        machine=Machine.of_kind("gpu", kind),
    )


def _estimate(problem: Problem) -> Estimate | None:
    operation = KNOWN[problem.operation]
    if not speed.has_estimate(operation, operation.kernels[0], problem):
        return None
    return functools.partial(transfers.estimate, operation)


if __name__ == "__main__":
    for path in sorted(tables.folder().glob("*.toml")):
        for how, found in zip(("several", "nearest"), left_out(tables.read(path)), strict=True):
            print(f"{path.stem}, by {how}: {found}")
