"""What GPU tests have found, for their own verdict and for the summary of the whole run.

A test's findings go to its report's `user_properties`, which also come from the workers of
pytest-xdist; `summarise` reads them all at the end.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from stress import Result
from verification import Outcome

CHECKS, LAUNCHES, RATIO = "stretto checks", "stretto launches", "stretto ratio"


@dataclasses.dataclass(frozen=True)
class Tally:
    """Counts one test's checks; `record(name, value)` adds to its report."""

    record: Callable[[str, Any], None]

    def outcomes(self, outcomes: Iterable[Outcome]) -> None:
        """Counts verifications, and fails if there are none, or if one found a flaw."""
        outcomes = list(outcomes)
        self.record(CHECKS, len(outcomes))
        for outcome in outcomes:
            self.record(RATIO, [outcome.label, *outcome.ratios])
        assert outcomes, "nothing was verified"
        self.none([f"{o.label}: {flaw}" for o in outcomes for flaw in o.flaws])

    def stress(self, result: Result) -> None:
        """Counts launches, and fails if one went wrong."""
        self.record(LAUNCHES, result.launches)
        self.record(CHECKS, result.verified)
        self.none(result.flaws)
        assert result.verified, "nothing was verified"

    def launches(self, count: int, wrong: Any) -> None:
        """Counts launches that were all verified, and fails if any element was wrong."""
        self.record(LAUNCHES, count)
        self.record(CHECKS, count)
        assert not wrong.any(), f"wrong elements, by device: {wrong}"

    def checks(self, count: int) -> None:
        """Counts comparisons that the test makes itself."""
        self.record(CHECKS, count)

    def none(self, flaws: Iterable[str]) -> None:
        """Fails if there are any, with all of them."""
        flaws = list(flaws)
        assert not flaws, "\n" + "\n".join(flaws)


def summarise(properties: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, str]]:
    """(heading, text) lines for what all tests recorded."""
    counts = {CHECKS: 0, LAUNCHES: 0}
    worst: dict[str, tuple[float, float, str]] = {}
    for name, value in properties:
        if name in counts:
            counts[name] += value
        elif name == RATIO:
            label, largest, mean = value
            operation, _, sizes = label.partition(" ")
            worst[operation] = max(worst.get(operation, (0.0, 0.0, "")), (largest, mean, sizes))
    yield "checks", f"{counts[CHECKS]:,} comparisons, {counts[LAUNCHES]:,} launches under stress"
    for operation, (largest, mean, sizes) in sorted(worst.items()):
        yield operation, f"error at most {largest:.2f} times XLA's (mean {mean:.2f}) for {sizes}"
