"""What all pictures share: a colour and a mark for each peer, axes, lines, legends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stretto.benchmarks.pages.terminal import peer_label as label

COLOURS = {
    "fused": "#0072b2",
    "auto": "#56b4e9",
    "xla": "#d55e00",
    "xla-windowed": "#e69f00",
    "jax-pallas": "#009e73",
    "torch": "#cc79a7",
    "torch-symm": "#8e6bbf",
    "matmul": "#8a8a8a",
    "own-matmul": "#b0a080",
    "communication": "#8a8a8a",
}
MARKERS = {
    "fused": "o",
    "auto": "h",
    "xla": "s",
    "xla-windowed": "D",
    "jax-pallas": "^",
    "torch": "v",
    "torch-symm": "P",
    "matmul": "x",
    "own-matmul": "+",
    "communication": "x",
}
FLOOR = "#8a8a8a"


def size_axis(axes: Any, sizes: Sequence[int]) -> None:
    """Sizes in bytes along x, each named."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [_bytes(size) for size in sizes], rotation=45, ha="right")
    axes.minorticks_off()


def line(axes: Any, peer: str, x: Sequence[float], y: Sequence[float | None]) -> None:
    """One peer's figures, gaps where it has none."""
    axes.plot(
        x,
        [nan(value) for value in y],
        color=COLOURS.get(peer, FLOOR),
        marker=MARKERS.get(peer, "."),
        linewidth=2 if peer == "fused" else 1,
        zorder=4 if peer == "fused" else 3,
        label=label(peer),
    )


def finish(axes: Any, title: str) -> None:
    """Title, grid and legend."""
    axes.set_title(title, loc="left", fontsize="medium")
    axes.grid(alpha=0.25)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(fontsize="small", frameon=False, loc="upper left", bbox_to_anchor=(1.01, 1.0))


def nan(value: float | None) -> float:
    """`value`, not a number where there is none."""
    return float("nan") if value is None else value


def _bytes(size: int) -> str:
    for unit in ("B", "KB", "MB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size //= 1024
    return f"{size:.0f} GB"
