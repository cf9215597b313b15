"""Sizes drawn at random, spread evenly over operations and decades of rows."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

from stretto.benchmarks.cases.case import Case
from stretto.benchmarks.cases.shapes import operation_named
from stretto.benchmarks.errors import BenchmarkError
from stretto.benchmarks.measurements.results import Draw
from stretto.kernels.operation import Operation, Sizes

MOST_OTHERS = 64
"""The largest of a size that is neither rows nor columns nor a contraction, such as groups."""
KINDS = {"odd": 2, "even": 2, "eights": 8}
"""The kinds of sizes, a third of the cases each: odd ones, multiples of 2, multiples of 8."""
TRIES = 1000


def drawable(operation: Operation) -> bool:
    """Whether its sizes are rows, columns and a contraction (and a number of groups)."""
    return set(operation.sizes) <= set("mkng")


def cases(draw: Draw) -> list[Case]:
    """The cases, in a random order, so that the first cases are of all kinds.

    Each size is log-uniform. The rows of an operation's cases are drawn from as many equal parts of
    that distribution, one of each, so that every decade has its share of them.

    Raises:
      BenchmarkError: there are fewer different cases.
    """
    rng = random.Random(draw.seed)
    found: dict[tuple, Case] = {}
    for name, count in _shares(draw):
        for part, kind in zip(range(count), _kinds(count, rng), strict=True):
            case = _new_case(draw, operation_named(name), (part, count), kind, found, rng)
            found[case.key] = case
    return rng.sample(list(found.values()), len(found))


def _shares(draw: Draw) -> Iterator[tuple[str, int]]:
    """How many cases each operation has."""
    each, more = divmod(draw.count, len(draw.operations))
    for index, name in enumerate(draw.operations):
        yield name, each + (index < more)


def _kinds(count: int, rng: random.Random) -> list[str]:
    kinds = [kind for kind, _ in zip(list(KINDS) * count, range(count), strict=False)]
    return rng.sample(kinds, count)


def _new_case(
    draw: Draw,
    operation: Operation,
    part: tuple[int, int],
    kind: str,
    found: dict[tuple, Case],
    rng: random.Random,
) -> Case:
    """A case that is not among those `found`."""
    devices = draw.devices if operation.communicates else 1
    for _ in range(TRIES):
        own = _sizes(operation, part, kind, draw.largest, rng)
        sizes = {
            name: size * cut
            for (name, size), cut in zip(own.items(), _cuts(operation, devices), strict=True)
        }
        case = Case(operation=operation, sizes=sizes, dtype=draw.type, devices=devices)
        if case.key not in found:
            return case
    raise BenchmarkError(
        f"{draw.count} cases of sizes up to {draw.largest} are more than there are; ask for fewer,"
        " or for larger ones."
    )


def _sizes(
    operation: Operation, part: tuple[int, int], kind: str, largest: int, rng: random.Random
) -> Sizes:
    """A device's sizes; the first is of the given `part` (which, of how many) of its range."""
    found = {}
    for index, name in enumerate(operation.sizes):
        which, parts = part if index == 0 else (0, 1)
        most = largest if name in "mkn" else min(largest, MOST_OTHERS)
        drawn = most ** ((which + rng.random()) / parts)
        found[name] = _of_kind(drawn, kind, most) if name in "mkn" else max(1, round(drawn))
    return found


def _of_kind(drawn: float, kind: str, most: int) -> int:
    """A number of this kind near `drawn`, from 1 to `most`."""
    step = KINDS[kind]
    if kind == "odd":
        return min(2 * int(drawn / 2) + 1, most - 1 + most % 2)
    return min(max(step, step * round(drawn / step)), max(step, most // step * step))


def _cuts(operation: Operation, devices: int) -> list[int]:
    """By how much each size of the whole problem is larger than a device's."""
    whole = dict.fromkeys(operation.sizes, devices * devices)
    divisors = {name: divisor for name, _, divisor in operation.examples.needs(whole, devices)}
    return [divisors.get(name, 1) for name in operation.sizes]


def sizes_of_a_device(case: Case) -> Sizes:
    """A drawn case's sizes as they were drawn."""
    cuts = _cuts(case.operation, case.devices)
    return {name: size // cut for (name, size), cut in zip(case.sizes.items(), cuts, strict=True)}


def kind_of(case: Case) -> str:
    """Which of `KINDS` the sizes of a case are of."""
    drawn = [size for name, size in sizes_of_a_device(case).items() if name in "mkn"]
    if any(size % 2 for size in drawn):
        return "odd"
    return "even" if any(size % 8 for size in drawn) else "eights"


def decade_of(case: Case) -> int:
    """The power of ten at which the decade of a case's rows on a device begins."""
    rows = next(iter(sizes_of_a_device(case).values()))
    return 10 ** int(math.log10(rows) + 1e-9)
