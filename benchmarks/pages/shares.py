"""Pictures of the share of the floor: of every case, and of one kernel against the size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from stretto.benchmarks.measurements.results import Measurement
from stretto.benchmarks.pages.drawing import COLOURS, FLOOR, MARKERS, finish, label, size_axis
from stretto.benchmarks.pages.markdown import operation_peers

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LEAST_FLOOR_US = 10.0
"""Below this, launching takes longer than the floor, and a share of it says nothing."""

STYLES = ("-", "--", ":", "-.")


def by_case(cases: Sequence[Measurement], figure: Figure) -> Figure | None:
    """A row per case, a point per peer: how close each comes to its floor."""
    cases = [m for m in cases if m.floor is not None and m.floor >= LEAST_FLOOR_US]
    if not cases:
        return None
    figure.set_size_inches(7.5, 1.6 + 0.28 * len(cases))
    axes = figure.subplots()
    for peer in operation_peers(cases):
        pairs = [
            (100 * timed.share_of_floor, place)
            for place, m in enumerate(cases)
            if (timed := m.of(peer)) is not None and timed.share_of_floor
        ]
        if pairs:
            shares, places = zip(*pairs, strict=True)
            axes.scatter(
                shares,
                places,
                color=COLOURS.get(peer, FLOOR),
                marker=MARKERS.get(peer, "."),
                label=label(peer),
                zorder=4 if peer == "fused" else 3,
            )
    axes.axvline(100, color=FLOOR, linestyle="--")
    axes.set_yticks(range(len(cases)), [f"{m.kernel} {m.shape}" for m in cases])
    axes.invert_yaxis()
    axes.set_xlabel("share of the floor, %")
    axes.set_xlim(left=0)
    finish(axes, f"Share of the floor, {cases[0].devices} devices")
    return figure


def by_size(measurements: Sequence[Measurement], figure: Figure) -> Figure | None:
    """One kernel's share of the floor, and XLA's, against the size, for each number of devices."""
    measurements = [m for m in measurements if m.floor is not None and m.floor >= LEAST_FLOOR_US]
    if not measurements:
        return None
    axes = figure.subplots()
    counts = sorted({m.devices for m in measurements}, reverse=True)
    for devices, style in zip(counts, STYLES, strict=False):
        cases = sorted((m for m in measurements if m.devices == devices), key=_size)
        for peer in ("fused", "xla"):
            pairs = [
                (_size(m), 100 * timed.share_of_floor)
                for m in cases
                if (timed := m.of(peer)) is not None and timed.share_of_floor
            ]
            if pairs:
                sizes, percents = zip(*pairs, strict=True)
                name = f"{label(peer)}, {devices} devices"
                axes.plot(
                    sizes, percents, style, color=COLOURS[peer], marker=MARKERS[peer], label=name
                )
    axes.axhline(100, color=FLOOR, linestyle="--")
    axes.set_ylim(bottom=0)
    axes.set_ylabel("share of the floor, %")
    if measurements[0].has_matmul:
        axes.set_xscale("log")
        axes.set_xlabel("operations of the whole problem, TFLOP")
    else:
        size_axis(axes, sorted({m.size for m in measurements}))
    finish(axes, f"{measurements[0].kernel}, share of the floor")
    return figure


def _size(measurement: Measurement) -> float:
    """Of a matmul the operations over all devices, in 1e12; of a collective its bytes."""
    if measurement.has_matmul:
        return 1e-12 * measurement.flops * measurement.devices
    return float(measurement.size)
