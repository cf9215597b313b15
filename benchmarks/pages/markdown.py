"""Results as Markdown tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from stretto.benchmarks.measurements.results import Measurement, Results, Timed
from stretto.benchmarks.measurements.spread import Interval
from stretto.benchmarks.pages.terminal import number, peer_label, percent
from stretto.benchmarks.peers.peer import COMMUNICATION, MATMUL
from stretto.benchmarks.peers.peers import PEERS

NONE = "-"


def rows(header: Sequence[str], body: Iterable[Sequence[str]], left: int = 1) -> str:
    """A Markdown table; the first `left` columns are aligned to the left, the others right."""
    rule = ["---" if index < left else "---:" for index in range(len(header))]
    lines = [header, rule, *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def peers_in(measurements: Iterable[Measurement], roles: Sequence[str] = ()) -> list[str]:
    """The peers that have a time in any of `measurements`, in the order of `PEERS`."""
    found = {
        timed.peer
        for measurement in measurements
        for timed in measurement.timed
        if not roles or timed.role in roles
    }
    return [name for name in PEERS if name in found] + sorted(found - PEERS.keys())


def written_by(names: Iterable[str]) -> str:
    """The last line of a page that results files make."""
    return f"Written by `stretto bench document {' '.join(names)}`; do not edit.\n"


def operation_peers(measurements: Sequence[Measurement]) -> list[str]:
    """Those of `peers_in` that do the whole operation, but for those timed only on request."""
    parts = set(peers_in(measurements, (MATMUL, COMMUNICATION)))
    asked_for = {peer.name for peer in PEERS.values() if peer.on_request}
    return [name for name in peers_in(measurements) if name not in parts | asked_for]


def limits_table(measurements: Iterable[Measurement]) -> str:
    """The kernels beside themselves with waits that have no limit; empty if none was so timed."""
    body = []
    for measurement in measurements:
        bounded, unbounded = measurement.of("fused"), measurement.of("fused-no-limit")
        if bounded is None or unbounded is None:
            continue
        cells = [f"`{measurement.kernel}`", measurement.shape, str(measurement.devices)]
        for timed in (bounded, unbounded):
            cells.append(
                f"{number(timed.time)} ({number(timed.time_p10)} to {number(timed.time_p90)})"
            )
        body.append([*cells, difference(measurement.ratio(bounded, unbounded))])
    header = ["kernel", "shape", "devices", "with the limit", "without", "difference"]
    return rows(header, body, left=2) if body else ""


def difference(ratio: Interval | None) -> str:
    """By how many percent a time is the larger, with its interval; "equal" where it may be none.

    A dash where there were too few rounds for an interval.
    """
    if ratio is None:
        return NONE
    percents = f"{100 * (ratio.value - 1):+.1f}±{100 * ratio.half:.1f}%"
    return f"equal ({percents})" if ratio.holds(1) else percents


def microseconds(timed: Timed | None, with_share: bool = False) -> str:
    """A time, with its share of the floor in brackets if requested and known."""
    if timed is None:
        return NONE
    share = percent(timed.share_of_floor) if with_share else ""
    return f"{number(timed.time)} ({share})" if share else number(timed.time)


def times_table(measurements: Sequence[Measurement], leave_out: Sequence[str] = ()) -> str:
    """Cases of any kernels, one a row: floor and every peer's time, Stretto's with its share.

    In bold the fastest, and what cannot be told apart from it.
    """
    names = [name for name in operation_peers(measurements) if name not in leave_out]
    header = ["kernel", "shape", "floor", *map(peer_label, names)]
    body = []
    for measurement in measurements:
        cells = [f"`{measurement.kernel}`", measurement.shape, number(measurement.floor) or NONE]
        fastest = {timed.peer for timed in measurement.as_fast_as_the_fastest(names)}
        for name in names:
            timed = measurement.of(name)
            text = microseconds(timed, with_share=timed is not None and timed.role == "fused")
            cells.append(f"**{text}**" if name in fastest else text)
        body.append(cells)
    return rows(header, body, left=2)


def kernel_table(measurements: Sequence[Measurement]) -> str:
    """Cases of one kernel: floor, parts, peers, Stretto's share of the floor and rate."""
    parts = peers_in(measurements, (MATMUL, COMMUNICATION))
    names = operation_peers(measurements)
    collective = not measurements[0].has_matmul
    rate = "bus GB/s" if collective else "TFLOP/s"
    header = [
        "shape",
        "type",
        *map(peer_label, parts),
        "floor",
        *map(peer_label, names),
        "of floor",
        rate,
    ]
    body = []
    for measurement in measurements:
        ours = measurement.of("fused") or measurement.of("auto")
        figure = None if ours is None else ours.bus_bw if collective else ours.tflops
        body.append(
            [
                measurement.shape,
                measurement.type,
                *(microseconds(measurement.of(name)) for name in parts),
                number(measurement.floor) or NONE,
                *(microseconds(measurement.of(name)) for name in names),
                percent(ours.share_of_floor) or NONE if ours else NONE,
                number(figure) or NONE,
            ]
        )
    return rows(header, body, left=2)


def missing_list(results: Results) -> str:
    """Who has no time, and why: one line per reason."""
    reasons: dict[tuple[str, str], int] = {}
    for measurement in results.measurements:
        for missing in measurement.missing:
            key = (peer_label(missing.peer), missing.reason)
            reasons[key] = reasons.get(key, 0) + 1
        if measurement.skipped:
            key = (f"{measurement.kernel} {measurement.shape}", measurement.skipped)
            reasons[key] = reasons.get(key, 0) + 1
    lines = [f"- {name}, {count} cases: {why}" for (name, why), count in reasons.items()]
    return "\n".join(lines) + "\n" if lines else ""
