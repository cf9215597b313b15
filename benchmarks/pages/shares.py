"""Pictures of the share of the floor: of every case, and of one kernel against the size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from stretto.benchmarks.measurements.results import Measurement
from stretto.benchmarks.pages.drawing import (
    COLOURS,
    FLOOR,
    MARKERS,
    finish,
    label,
    points,
    rows,
    size_axis,
    title,
)
from stretto.benchmarks.pages.markdown import operation_peers

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LEAST_FLOOR_US = 10.0
"""Below this, launching takes longer than the floor, and a share of it says nothing."""

STYLES = ("-", "--", ":", "-.")
FILLS = ("full", "none", "left", "top")

FLOOR_NAME = "fastest matmul of\nthis run, or the link"
MATMUL_SHARE = "share of the floor: the fastest matmul of this run, or the link, %"
LINK_SHARE = "share of the floor: the link, %"
"""The meaning of 100%. Programs of the whole operation multiply too, and count as matmuls."""


def by_case(cases: Sequence[Measurement], card: str, figure: Figure) -> Figure | None:
    """A row per case, a point per peer: how close each comes to its floor."""
    cases = [m for m in cases if m.floor is not None and m.floor >= LEAST_FLOOR_US]
    if not cases:
        return None
    axes = rows(figure, [f"{m.kernel} {m.shape}" for m in cases])
    for peer in operation_peers(cases):
        pairs = [
            (100 * timed.share_of_floor, place)
            for place, m in enumerate(cases)
            if (timed := m.of(peer)) is not None and timed.share_of_floor
        ]
        if pairs:
            shares, places = zip(*pairs, strict=True)
            points(axes, peer, shares, places)
    axes.axvline(100, color=FLOOR, linestyle="--")
    axes.set_xlabel(MATMUL_SHARE if any(m.has_matmul for m in cases) else LINK_SHARE)
    axes.set_xlim(left=0)
    finish(axes, title("Share of the floor", card, cases))
    return figure


def by_size(measurements: Sequence[Measurement], card: str, figure: Figure) -> Figure | None:
    """One kernel's share of the floor, and XLA's, against the size, for each number of devices."""
    measurements = [m for m in measurements if m.floor is not None and m.floor >= LEAST_FLOOR_US]
    if not measurements:
        return None
    axes = figure.subplots()
    counts = sorted({m.devices for m in measurements}, reverse=True)
    # Matmuls of one amount of work have many shapes, so their points are not joined.
    joined = not measurements[0].has_matmul
    for devices, style, fill in zip(counts, STYLES, FILLS, strict=False):
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
                    sizes,
                    percents,
                    linestyle=style if joined else "none",
                    color=COLOURS[peer],
                    marker=MARKERS[peer],
                    fillstyle=fill,
                    label=name,
                )
    axes.axhline(100, color=FLOOR, linestyle="--")
    axes.set_ylabel("share of the floor, %")
    axes.set_ylim(0, max(105, axes.get_ylim()[1]))
    if measurements[0].has_matmul:
        axes.set_xscale("log")
        axes.set_xlabel("operations of the whole problem, TFLOP")
    else:
        size_axis(axes, sorted({m.size for m in measurements}))
    finish(axes, title(measurements[0].kernel, card, measurements))
    return figure


def _size(measurement: Measurement) -> float:
    """Of a matmul the operations over all devices, in 1e12; of a collective its bytes."""
    if measurement.has_matmul:
        return 1e-12 * measurement.flops * measurement.devices
    return float(measurement.size)
