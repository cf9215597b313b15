"""`stretto bench compare A.json B.json`: what changed between two results."""

from __future__ import annotations

import dataclasses
import enum
import pathlib
import sys

import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from stretto.benchmarks.measurements import results
from stretto.benchmarks.measurements.results import Measurement, Results, Timed
from stretto.benchmarks.measurements.spread import Interval, ratio_of_runs
from stretto.benchmarks.pages import terminal


class Verdict(enum.Enum):
    """How a peer's time changed."""

    EQUAL = "equal"
    FASTER = "faster"
    SLOWER = "slower"
    REGRESSION = "regression"
    GONE = "no time any more"
    NEW = "new"


@dataclasses.dataclass(frozen=True)
class Change:
    """One peer of one case in both files; the one that lacks it is None.

    `ratio` is its time after over that before, None where there were too few samples.
    """

    measurement: Measurement
    before: Timed | None
    after: Timed | None
    verdict: Verdict
    ratio: Interval | None = None

    @property
    def percent(self) -> float | None:
        """The slowdown, in percent of the time before."""
        if self.before is None or self.after is None:
            return None
        return 100 * (self.after.time / self.before.time - 1)


@dataclasses.dataclass(frozen=True)
class CompareOptions:
    """List what changed between two results.

    Two times are equal where the 95% interval of their ratio holds 1. Exits with status 1 if one of
    Stretto's kernels became slower by more than the threshold, or lost its time.
    """

    before: tyro.conf.Positional[pathlib.Path]
    """The older results."""
    after: tyro.conf.Positional[pathlib.Path]
    """The newer results."""
    threshold: float = 3.0
    """A slowdown beyond this many percent, and not equal, is a regression."""
    all_peers: bool = False
    """Count other libraries' slowdowns as regressions too."""


def main(argv: list[str]) -> int:
    """Runs `stretto bench compare ARGV`; returns 0, or 1 on a regression."""
    options = tyro.cli(CompareOptions, prog="stretto bench compare", args=argv)
    before, after = results.read(options.before), results.read(options.after)
    changes = compare(before, after, options.threshold)
    if different := differences(before, after):
        print(f"stretto bench compare: not alike: {'; '.join(different)}", file=sys.stderr)
    _print(Console(), changes)
    bad = (Verdict.REGRESSION, Verdict.GONE)
    counted = [
        change
        for change in changes
        if change.verdict in bad and (options.all_peers or _is_ours(change))
    ]
    return int(bool(counted))


def compare(before: Results, after: Results, threshold_percent: float) -> list[Change]:
    """Every peer of every case that either file timed, in the order of the files.

    A case that only one of the files was asked for is left out; a peer that lost or got its time
    in a case of both is not.
    """
    newer = {measurement.key: measurement for measurement in after.measurements}
    found = []
    for old in before.measurements:
        new = newer.get(old.key)
        if new is None:
            continue
        names = dict.fromkeys(timed.peer for timed in (*old.timed, *new.timed))
        for name in names:
            found.append(_change(old, new, name, threshold_percent))
    return found


def _change(old: Measurement, new: Measurement, peer: str, threshold_percent: float) -> Change:
    before, after = old.of(peer), new.of(peer)
    if before is None:
        return Change(new, before, after, Verdict.NEW)
    if after is None:
        asked = any(missing.peer == before.peer for missing in new.missing)
        verdict = Verdict.GONE if asked or new.skipped else Verdict.EQUAL
        return Change(new, before, after, verdict)
    ratio = ratio_of_runs(after.samples, before.samples, (new.per_visit, old.per_visit))
    if ratio is None or ratio.holds(1):
        verdict = Verdict.EQUAL
    elif after.time < before.time:
        verdict = Verdict.FASTER
    elif after.time > before.time * (1 + threshold_percent / 100):
        verdict = Verdict.REGRESSION
    else:
        verdict = Verdict.SLOWER
    return Change(new, before, after, verdict, ratio)


def differences(before: Results, after: Results) -> list[str]:
    """The differences between the machines that could explain a change, in words."""
    found = []
    for what in ("card", "num_devices", "layout", "driver"):
        old, new = getattr(before.machine, what), getattr(after.machine, what)
        if old != new:
            found.append(f"{what} {old!r} and {new!r}")
    for package in ("jax", "nvidia-nccl-cu13", "nvidia-nccl-cu12", "torch"):
        old, new = before.machine.versions.get(package), after.machine.versions.get(package)
        if old != new:
            found.append(f"{package} {old} and {new}")
    return found


def _is_ours(change: Change) -> bool:
    timed = change.before or change.after
    return timed is not None and timed.role == "fused"


def _print(console: Console, changes: list[Change]) -> None:
    shown = [change for change in changes if change.verdict is not Verdict.EQUAL]
    if shown:
        rows = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for column in ("case", "peer", "before us", "after us", "change", ""):
            rows.add_column(column, justify="left" if column in ("case", "peer", "") else "right")
        for change in shown:
            timed = change.after or change.before
            rows.add_row(
                terminal.heading(change.measurement),
                terminal.label(timed) if timed is not None else "",
                terminal.number(change.before.time if change.before else None),
                terminal.number(change.after.time if change.after else None),
                _percent(change),
                change.verdict.value,
            )
        console.print(rows)
    same = len(changes) - len(shown)
    console.print(f"{len(changes)} times compared, {same} equal.", highlight=False)


def _percent(change: Change) -> str:
    if change.percent is None:
        return ""
    half = "" if change.ratio is None else f"±{100 * change.ratio.half:.1f}"
    return f"{change.percent:+.1f}{half}%"
