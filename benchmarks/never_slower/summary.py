"""How often `auto` was wrong, as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stretto.benchmarks.measurements.results import Results, in_order
from stretto.benchmarks.measurements.spread import Interval
from stretto.benchmarks.never_slower.draw import decade_of, kind_of
from stretto.benchmarks.never_slower.verdicts import Verdict, verdict
from stretto.benchmarks.pages import markdown, terminal

COLUMNS = ("drawn", "timed", "XLA's program", "slower", "undecided", "beaten")


def of(results: Results) -> str:
    """The summary of one draw: a sentence, tables by operation, rows, kind, and every mistake."""
    found = [verdict(measurement) for measurement in results.measurements]
    draw = results.draw
    parts = [f"{terminal.machine_line(results)}; {results.start_time[:10]}."]
    if draw is not None:
        parts.append(
            f"Seed {draw.seed}: {len(found)} of {draw.count} cases done, sizes of a device to"
            f" {draw.largest}, {draw.type}, {draw.devices} devices."
        )
    parts.append(_sentence(found))
    parts.append(_table("operation", found, lambda one: one.case.operation.name))
    parts.append(_table("rows of a device from", found, lambda one: f"{decade_of(one.case)}"))
    parts.append(_table("sizes", found, lambda one: kind_of(one.case)))
    parts += [text for text in (_mistakes(found), _left_out(found)) if text]
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def slower(results: Results) -> int:
    """In how many cases `auto` was slower than XLA."""
    return sum(verdict(measurement).is_slower for measurement in results.measurements)


def _sentence(found: Sequence[Verdict]) -> str:
    drawn, timed, same, slow, undecided, beaten = _counts(found)
    return (
        f"`auto` was slower than XLA in {slow} of {timed} cases, and in {beaten} a configuration"
        f" that was drawn was faster than `auto`. In {same} it was XLA's own program, in"
        f" {undecided} nothing can be said of 2%, and {int(drawn) - int(timed)} were not timed."
    )


def _counts(found: Sequence[Verdict]) -> list[str]:
    tests: tuple[Callable[[Verdict], bool], ...] = (
        lambda one: True,
        lambda one: not one.skipped,
        lambda one: one.same_program,
        lambda one: one.is_slower,
        lambda one: one.is_undecided,
        lambda one: one.is_beaten,
    )
    return [str(sum(map(test, found))) for test in tests]


def _table(title: str, found: Sequence[Verdict], group: Callable[[Verdict], str]) -> str:
    groups: dict[str, list[Verdict]] = {}
    for one in found:
        groups.setdefault(group(one), []).append(one)
    if title == "operation":
        names = in_order(groups)
    else:
        names = sorted(groups, key=lambda name: (len(name) * name.isdigit(), name))
    return markdown.rows([title, *COLUMNS], [[name, *_counts(groups[name])] for name in names])


def _mistakes(found: Sequence[Verdict]) -> str:
    """A row for every case in which `auto` was slower, beaten, or wrong."""
    rows = [
        [
            f"`{one.case.operation.name}`",
            one.case.shape,
            one.backend,
            _ratio(one.over_xla),
            _ratio(one.drawn) if one.is_beaten else markdown.NONE,
            f"`{one.config}`" if one.is_beaten else one.wrong or markdown.NONE,
        ]
        for one in found
        if one.is_slower or one.is_beaten or one.wrong
    ]
    header = ["operation", "sizes", "`auto` took", "`auto` over XLA"]
    header += ["drawn over `auto`", "the configuration drawn"]
    return markdown.rows(header, rows, left=3) if rows else ""


def _ratio(found: Interval | None) -> str:
    return markdown.NONE if found is None else f"{found.value:.3f}±{found.half:.3f}"


def _left_out(found: Sequence[Verdict]) -> str:
    """Why cases were not timed, one reason a line."""
    reasons: dict[str, int] = {}
    for one in found:
        if one.skipped:
            reason = (
                "it does not fit in memory" if "GB on each device" in one.skipped else one.skipped
            )
            reasons[reason] = reasons.get(reason, 0) + 1
    return "\n".join(f"- {count} not timed: {reason}" for reason, count in reasons.items())
