"""The common parts of all pictures: colours and marks of peers, axes, lines, titles, legends.

The colours are Okabe and Ito's, which the colour-blind can tell apart, and each peer has a mark of
its own as well. The grey of floors is darker than theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stretto.benchmarks.measurements.results import Measurement
from stretto.benchmarks.pages.terminal import peer_label as label

COLOURS = {
    "fused": "#0072b2",
    "auto": "#56b4e9",
    "xla": "#d55e00",
    "xla-windowed": "#e69f00",
    "jax-pallas": "#009e73",
    "torch": "#cc79a7",
    "torch-symm": "#000000",
}
MARKERS = {
    "fused": "o",
    "auto": "o",
    "xla": "s",
    "xla-windowed": "D",
    "jax-pallas": "^",
    "torch": "v",
    "torch-symm": "P",
}
FLOOR = "#606060"


def size_axis(axes: Any, sizes: Sequence[int]) -> None:
    """Sizes in bytes along x, each named."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [_bytes(size) for size in sizes], rotation=45, ha="right")
    axes.minorticks_off()


def log_ticks(axis: Any) -> None:
    """Labels 1, 2 and 5 times powers of ten as plain numbers, on a logarithmic axis.

    Matplotlib's own labels of a range below two decades overlap.
    """
    from matplotlib import ticker

    axis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(ticker.NullFormatter())


def line(axes: Any, peer: str, x: Sequence[float], y: Sequence[float | None]) -> None:
    """One peer's figures, gaps where it has none."""
    axes.plot(
        x,
        [nan(value) for value in y],
        color=COLOURS.get(peer, FLOOR),
        linewidth=2 if peer == "fused" else 1,
        zorder=4 if peer == "fused" else 3,
        label=label(peer),
        **mark(peer),
    )


def points(axes: Any, peer: str, x: Sequence[float], y: Sequence[float]) -> None:
    """One peer's figures of things that are unlike, so that no line joins them."""
    axes.plot(
        x,
        y,
        linestyle="none",
        color=COLOURS.get(peer, FLOOR),
        zorder=4 if peer == "fused" else 3,
        label=label(peer),
        **mark(peer),
    )


def mark(peer: str) -> dict[str, Any]:
    """A peer's mark. `auto` is a ring around the mark of the peer that served it."""
    if peer == "auto":
        return dict(marker="o", markersize=11, markerfacecolor="none", markeredgewidth=1.5)
    return dict(marker=MARKERS.get(peer, "."))


def title(what: str, card: str, cases: Sequence[Measurement]) -> str:
    """The title: the figure, the card, the number of devices and the types."""
    counts = sorted({m.devices for m in cases})
    types = ", ".join(dict.fromkeys(m.type for m in cases))
    *first, last = map(str, counts)
    numbers = f"{', '.join(first)} and {last}" if first else last
    return f"{what}: {numbers} x {card}, {types}"


def rows(figure: Any, names: Sequence[str]) -> Any:
    """Axes with a row for each name, from top to bottom, in a figure as high as that takes."""
    figure.set_size_inches(8.5, max(3.8, 1.6 + 0.28 * len(names)))
    axes = figure.subplots()
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    return axes


def finish(axes: Any, title: str) -> None:
    """Title, grid and legend."""
    axes.set_title(title, loc="left", fontsize="medium")
    axes.grid(alpha=0.25)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    legend = axes.legend(
        fontsize="small", frameon=False, loc="upper left", bbox_to_anchor=(1.01, 1.0)
    )
    width, height = axes.figure.get_size_inches()
    axes.figure.set_size_inches(width, max(height, 1.2 + 0.2 * len(legend.get_texts())))


def nan(value: float | None) -> float:
    """`value`, not a number where there is none."""
    return float("nan") if value is None else value


def _bytes(size: int) -> str:
    for unit in ("B", "KB", "MB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size //= 1024
    return f"{size:.0f} GB"
