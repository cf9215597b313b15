"""A plan as a picture: the speed of a step on more GPUs, and the parts of its time."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from stretto.benchmarks.pages import plots
from stretto.benchmarks.pages.drawing import COLOURS, FLOOR
from stretto.benchmarks.scaling.planned import Plan, ScalingRow

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIZE = (9.0, 7.0)
PARTS = {
    "products": "products",
    "attention": "attention",
    "experts": "experts' products",
    "memory": "norms, copies, optimiser",
    "tp": "rows along tp, not hidden",
    "cp": "keys and values along cp",
    "ep": "sending experts' rows",
    "gradients": "sum of gradients",
    "state": "gathering the shared state",
}
_SHADES = (
    "#0072b2",
    "#56b4e9",
    "#000000",
    "#f0e442",
    "#d55e00",
    "#e69f00",
    "#cc79a7",
    "#505050",
    "#009e73",
)


def write(plan: Plan, path: pathlib.Path) -> None:
    """Writes the picture, in the format that the file's ending names.

    Raises:
      BenchmarkError: matplotlib is not installed, or the file cannot be written.
    """
    plots.check_available("--picture")
    plots.save(plots.figure(lambda figure: draw(plan, figure)), path)


def draw(plan: Plan, figure: Figure) -> None:
    """Tokens a second above, with intervals; below what the time of strong scaling goes to."""
    figure.set_size_inches(SIZE)
    above, below = figure.subplots(2, 1, height_ratios=(1.1, 1.0))
    origin = "as published" if plan.origin == "published" else "as measured"
    above.set_title(f"{plan.model} on {plan.machine}, links {origin}", loc="left")
    _rates(above, plan)
    _shares(below, plan.strong)


def _rates(axes: Any, plan: Plan) -> None:
    batch = plan.strong[0].batch if plan.strong else 0
    for name, rows, colour in (
        (f"strong: {batch} sequences", plan.strong, COLOURS["fused"]),
        ("weak: one sequence a GPU", plan.weak, COLOURS["xla"]),
    ):
        found = [row for row in rows if row.best is not None]
        if not found:
            continue
        counts = [row.gpus for row in found]
        tokens = [row.best.tokens_per_s for row in found if row.best]
        bests = [row.best for row in found if row.best]
        lows = [best.tokens_per_s * best.step_s / best.high_s for best in bests]
        highs = [best.tokens_per_s * best.step_s / best.low_s for best in bests]
        axes.fill_between(counts, lows, highs, color=colour, alpha=0.18, linewidth=0)
        axes.plot(counts, tokens, marker="o", color=colour, label=name)
    strong = [row for row in plan.strong if row.best is not None]
    if len(strong) > 1 and strong[0].best is not None:
        first = strong[0].best.tokens_per_s / strong[0].gpus
        ideal = [first * row.gpus for row in strong]
        counts = [row.gpus for row in strong]
        axes.plot(counts, ideal, color=FLOOR, linestyle="--", label="strong, at 100%")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    counts = [row.gpus for row in plan.strong]
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.minorticks_off()
    axes.set_ylabel("tokens a second")
    _finish(axes)


def _shares(axes: Any, rows: Sequence[ScalingRow]) -> None:
    places = range(len(rows))
    bottoms = [0.0] * len(rows)
    for (part, words), colour in zip(PARTS.items(), _SHADES, strict=True):
        shares = [
            100 * row.best.parts_s.get(part, 0.0) / row.best.step_s if row.best else 0.0
            for row in rows
        ]
        if not any(shares):
            continue
        axes.bar(places, shares, bottom=bottoms, color=colour, width=0.7, label=words)
        bottoms = [bottom + share for bottom, share in zip(bottoms, shares, strict=True)]
    for place, row in enumerate(rows):
        if row.best is None:
            axes.text(place, 50, "none\nfits", ha="center", va="center", fontsize="small")
    splits = [row.best.split.replace(" ", "\n") if row.best else "" for row in rows]
    axes.set_xticks(list(places), [f"{row.gpus}\n{s}" for row, s in zip(rows, splits, strict=True)])
    axes.set_xlim(-0.6, len(rows) - 0.4)
    axes.set_xlabel("GPUs, and the fastest split that fits")
    axes.set_ylabel("share of a step, %")
    _finish(axes)


def _finish(axes: Any) -> None:
    axes.grid(alpha=0.25, axis="y")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(fontsize="small", frameon=False, loc="upper left", bbox_to_anchor=(1.01, 1.0))
