"""The pictures: each function draws one, or returns None without data for it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from stretto.benchmarks.measurements import figures
from stretto.benchmarks.measurements.results import Measurement, Results, in_order, order_of
from stretto.benchmarks.pages import shares
from stretto.benchmarks.pages.drawing import (
    COLOURS,
    FLOOR,
    finish,
    label,
    line,
    log_ticks,
    nan,
    points,
    rows,
    size_axis,
    title,
)
from stretto.benchmarks.pages.markdown import operation_peers, peers_in
from stretto.benchmarks.peers.peer import FUSED, MATMUL, XLA

if TYPE_CHECKING:
    from matplotlib.figure import Figure

type Draw = Callable[..., Any]

SMALL = 1 << 20
"""Bytes below which a collective is a matter of latency, not of bandwidth."""


def all_pictures(results: Results, figure: Callable[[], Figure]) -> dict[str, Figure]:
    """By name, every picture that `results` hold data for; `figure` makes an empty one."""
    measurements = [m for m in results.measurements if m.timed]
    most = max((m.devices for m in measurements), default=0)
    largest = [m for m in measurements if m.devices == most]
    card = results.machine.card
    found: dict[str, Figure | None] = {}
    for kernel in in_order(m.kernel for m in largest):
        cases = sorted((m for m in largest if m.kernel == kernel), key=_work)
        if cases[0].has_matmul:
            found[f"rate-{kernel}"] = rate(cases, card, figure())
        elif most > 1:
            found[f"bandwidth-{kernel}"] = bandwidth(cases, card, figure())
            found[f"latency-{kernel}"] = latency(cases, card, figure())
        every = [m for m in measurements if m.kernel == kernel and m.devices > 1]
        found[f"share-{kernel}"] = shares.by_size(every, card, figure())
        every = [m for m in measurements if m.kernel == kernel]
        found[f"scaling-{kernel}"] = scaling(every, card, figure())
    found["share-of-floor"] = shares.by_case(sorted(largest, key=_case_order), card, figure())
    found["roofline"] = roofline(largest, _link(results, largest), card, figure())
    return {name: picture for name, picture in found.items() if picture is not None}


def rate(cases: Sequence[Measurement], card: str, figure: Figure) -> Figure | None:
    """TFLOP/s per device of every peer, a row for each shape, with the floor's."""
    cases = [m for m in cases if m.floor is not None and m.floor >= shares.LEAST_FLOOR_US]
    if not cases:
        return None
    axes = rows(figure, [m.shape for m in cases])
    floors = [_rate(m.flops, m.floor) for m in cases]
    places = range(len(cases))
    axes.plot(floors, places, "|", color=FLOOR, markersize=14, label=shares.FLOOR_NAME)
    for peer in operation_peers(cases):
        found = [
            (_rate(m.flops, timed.time), place)
            for place, m in enumerate(cases)
            if (timed := m.of(peer))
        ]
        if found:
            rates, at = zip(*found, strict=True)
            points(axes, peer, rates, at)
    axes.set_xlabel("TFLOP/s per device")
    axes.set_xlim(left=0)
    finish(axes, title(cases[0].kernel, card, cases))
    return figure


def bandwidth(cases: Sequence[Measurement], card: str, figure: Figure) -> Figure | None:
    """Bus bandwidth of every peer against the size, with the link's, from `SMALL` up."""
    cases = _one_a_size([m for m in cases if m.size >= SMALL])
    if not cases:
        return None
    axes = figure.subplots()
    sizes = [m.size for m in cases]
    floors = [m.sent_bytes / m.floor / 1e3 if m.floor else None for m in cases]
    axes.plot(
        sizes, [nan(value) for value in floors], color=FLOOR, linestyle="--", label="the link"
    )
    for peer in peers_in(cases):
        line(axes, peer, sizes, [timed.bus_bw if (timed := m.of(peer)) else None for m in cases])
    size_axis(axes, sizes)
    axes.set_ylabel("bus bandwidth, GB/s")
    axes.set_ylim(bottom=0)
    finish(axes, title(cases[0].kernel, card, cases))
    return figure


def latency(cases: Sequence[Measurement], card: str, figure: Figure) -> Figure | None:
    """Time of every peer against the size, below `SMALL`."""
    cases = _one_a_size([m for m in cases if m.size < SMALL])
    if not cases:
        return None
    axes = figure.subplots()
    sizes = [m.size for m in cases]
    for peer in peers_in(cases):
        line(axes, peer, sizes, [timed.time if (timed := m.of(peer)) else None for m in cases])
    size_axis(axes, sizes)
    axes.set_ylabel("time, us")
    axes.set_ylim(bottom=0)
    finish(axes, title(f"{cases[0].kernel}, small", card, cases))
    return figure


def scaling(measurements: Sequence[Measurement], card: str, figure: Figure) -> Figure | None:
    """Efficiency of one kernel against the number of devices, strong and weak, a colour a shape."""
    strong = figures.strong_efficiencies(measurements, "fused")
    weak = figures.weak_efficiencies(measurements, "fused")
    lines = [
        (style, shape, name, row)
        for style, name, found in (("-", "strong", strong), (":", "weak", weak))
        for (_, shape, _), row in found.items()
        if len(row) > 1
    ]
    if not lines:
        return None
    axes = figure.subplots()
    shapes = list(dict.fromkeys(line[1] for line in lines))
    # Shades, not colours: those are the peers', and all of these lines are of one.
    shades = {shape: f"{0.75 * place / len(shapes):.2f}" for place, shape in enumerate(shapes)}
    marks = dict(zip(shapes, itertools.cycle("osD^vP*X"), strict=False))
    for style, shape, name, row in lines:
        counts = sorted(row)
        percents = [100 * row[count] for count in counts]
        label = f"{shape}, {name}"
        axes.plot(counts, percents, style, marker=marks[shape], color=shades[shape], label=label)
    counts = sorted({count for *_, row in lines for count in row})
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.axhline(100, color=FLOOR, linestyle="--")
    axes.set_xlabel("devices")
    axes.set_ylabel("efficiency, %")
    most = max(100, *(100 * value for *_, row in lines for value in row.values()))
    axes.set_ylim(0, 1.05 * most)
    axes.set_xlim(counts[0] - 0.2, counts[-1] + 0.2)
    every = [m for m in measurements if m.devices in counts]
    finish(axes, title(f"Scaling of {every[0].kernel}", card, every))
    return figure


def roofline(
    cases: Sequence[Measurement], link_gb_per_s: float | None, card: str, figure: Figure
) -> Figure | None:
    """TFLOP/s against operations per byte sent, under the roof of the link and of the arithmetic.

    The level part is the highest rate of all programs of the run, so no point is above it.
    """
    cases = [m for m in cases if m.flops and m.sent_bytes and (m.of("fused") or m.of("xla"))]
    matmuls = [t.tflops for m in cases for t in m.timed if t.role == MATMUL and t.tflops]
    if not cases or not matmuls or not link_gb_per_s:
        return None
    matmuls += [t.tflops for m in cases for t in m.timed if t.tflops]
    axes = figure.subplots()
    intensities = [m.flops / m.sent_bytes for m in cases]
    peak = max(matmuls)
    left, right = min(intensities) / 2, max(*intensities, 2e3 * peak / link_gb_per_s) * 2
    knee = 1e3 * peak / link_gb_per_s
    axes.plot(
        [left, knee, right],
        [left * link_gb_per_s / 1e3, peak, peak],
        color=FLOOR,
        linestyle="--",
        label=f"link at {link_gb_per_s:.3g} GB/s,\nhighest rate of this run",
    )
    markers = dict(zip(in_order(m.kernel for m in cases), itertools.cycle("o^sDvP"), strict=False))
    for role, peer in ((FUSED, "fused"), (XLA, "xla")):
        for kernel in markers:
            found = [
                (m.flops / m.sent_bytes, timed.tflops)
                for m in cases
                if m.kernel == kernel and (timed := m.of(peer)) is not None and timed.role == role
            ]
            if found:
                x, y = zip(*found, strict=True)
                name = f"{label(peer)}, {kernel}"
                axes.scatter(x, y, color=COLOURS[peer], marker=markers[kernel], label=name)
    axes.set_xscale("log")
    axes.set_yscale("log")
    log_ticks(axes.xaxis)
    log_ticks(axes.yaxis)
    axes.set_xlabel("floating-point operations per byte sent")
    axes.set_ylabel("TFLOP/s per device")
    finish(axes, title("Roofline", card, cases))
    return figure


def _rate(flops: int, microseconds: float | None) -> float:
    return float("nan") if not microseconds else flops / microseconds / 1e6


def _link(results: Results, cases: Sequence[Measurement]) -> float | None:
    """GB/s that a device can send: the link's; on a CPU, which has none, the highest of the run."""
    if results.measurement_of_speed:
        return results.link_gb_per_s
    rates = [
        m.sent_bytes / timed.time / 1e3
        for m in cases
        for timed in m.timed
        if m.sent_bytes and timed.time and timed.role != MATMUL
    ]
    return max(rates, default=None)


def _one_a_size(cases: Sequence[Measurement]) -> list[Measurement]:
    """Of the cases of a size, which may have other rows, the one that has most peers."""
    found: dict[int, Measurement] = {}
    for m in cases:
        if m.size not in found or len(m.timed) > len(found[m.size].timed):
            found[m.size] = m
    return [found[size] for size in sorted(found)]


def _work(measurement: Measurement) -> tuple:
    sizes = measurement.sizes.values()
    return (math.prod(sizes), *sizes)


def _case_order(measurement: Measurement) -> tuple:
    return (order_of(measurement.kernel), _work(measurement))
