"""The verdict on `auto` from the times of a drawn case."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from stretto.benchmarks.cases.case import Case
from stretto.benchmarks.cases.shapes import operation_named
from stretto.benchmarks.measurements import spread
from stretto.benchmarks.measurements.results import Measurement
from stretto.benchmarks.measurements.spread import Interval
from stretto.benchmarks.never_slower.candidates import DRAWN

SLOWER = 1.02
"""`auto` is slower than XLA where the whole interval of its ratio is above this."""
FASTER = 0.97
"""A configuration is faster than `auto` where the whole interval of its ratio is below this."""

SURELY = 0.999
"""Confidence of the intervals that end a case early. The verdict's own are at 95%: to look at one
of those after each round, and to stop once it decides, would be wrong more often than that."""


def is_decided(samples: Mapping[str, Sequence[float]], per_visit: int) -> bool:
    """Whether more samples of `auto`, XLA and the drawn configuration would change no verdict.

    That is where each interval, at `SURELY`, lies on one side of its limit.
    """
    pairs = (("auto", "xla", SLOWER), (DRAWN, "auto", FASTER))
    for ours, theirs, limit in pairs:
        if ours in samples and theirs in samples:
            found = spread.ratio(samples[ours], samples[theirs], per_visit, SURELY)
            if found is None or found.holds(limit):
                return False
    return True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """One case.

    Attributes:
      case: the timed case.
      skipped: why nothing was, "" if it was.
      over_xla: `auto`'s time over XLA's; None where one of them has no time.
      same_program: whether `auto` is XLA's program, and so cannot be slower.
      drawn: the time of the best configuration that was drawn over `auto`'s; None without one.
      backend: the implementation that served `auto`.
      config: of the best one drawn.
      wrong: the error in a result of Stretto, or "".
    """

    case: Case
    skipped: str = ""
    over_xla: Interval | None = None
    same_program: bool = False
    drawn: Interval | None = None
    backend: str = ""
    config: str = ""
    wrong: str = ""

    @property
    def is_slower(self) -> bool:
        """Whether `auto` is slower than XLA by more than 2%, as surely as the interval is."""
        return self.over_xla is not None and self.over_xla.low > SLOWER

    @property
    def is_undecided(self) -> bool:
        """Whether the interval contains 1.02, so that the case is undecided."""
        return self.over_xla is not None and self.over_xla.holds(SLOWER)

    @property
    def is_beaten(self) -> bool:
        """Whether a configuration that was drawn is faster than `auto` by more than 3%."""
        return self.drawn is not None and self.drawn.high < FASTER


def verdict(measurement: Measurement) -> Verdict:
    """The verdict of one measurement of `auto`, XLA and the drawn configurations."""
    operation = operation_named(measurement.kernel)
    case = Case(
        operation=operation,
        sizes={name: measurement.sizes[name] for name in operation.sizes},
        dtype=measurement.type,
        devices=measurement.devices,
    )
    if measurement.skipped:
        return Verdict(case=case, skipped=measurement.skipped)
    auto, xla, drawn = (measurement.of(name) for name in ("auto", "xla", DRAWN))
    reasons = {missing.peer: missing.reason for missing in measurement.missing}
    wrong = "; ".join(reason for reason in reasons.values() if "result is wrong" in reason)
    if auto is None or xla is None:
        failed = "auto" if auto is None else "xla"
        reason = reasons.get(failed, "it was not timed")
        return Verdict(case=case, skipped=f"{failed}: {reason}", wrong=wrong)
    return Verdict(
        case=case,
        over_xla=measurement.ratio(auto, xla),
        same_program=auto.samples == xla.samples,
        drawn=None if drawn is None else measurement.ratio(drawn, auto),
        backend=auto.backend,
        config="" if drawn is None else drawn.config,
        wrong=wrong,
    )
