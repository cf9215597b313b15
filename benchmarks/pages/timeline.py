"""A picture of one block's timeline."""

from __future__ import annotations

import json
import pathlib
from typing import Any

from stretto.benchmarks.pages import plots
from stretto.benchmarks.predict import trace
from stretto.benchmarks.predict.trace import Span

# By the first word of what was done; the first that fits.
_KINDS = (
    ("wait", ("wait",), "#c9ced4"),
    ("multiply", ("multiply", "wgmma"), "#0072b2"),
    ("communicate", ("communicate", "put", "get", "send", "pull"), "#d55e00"),
    ("load, copy", ("load", "copy"), "#e69f00"),
    ("store", ("store",), "#009e73"),
    ("signal", ("signal",), "#cc79a7"),
    ("other", ("",), "#8a8a8a"),
)


def write(trace_file: pathlib.Path, path: pathlib.Path) -> None:
    """Draws the timeline of one block of `trace_file` into `path`, an SVG or PNG."""
    plots.check_available()
    data = json.loads(trace_file.read_text())
    block, spans = trace.spans_of_one_block(data)
    about = data.get("otherData", {})
    title = ", ".join(text for text in (about.get("case"), block, about.get("about")) if text)
    plots.save(plots.figure(lambda figure: _draw(figure, spans, title)), path)


def kind_of(what: str) -> str:
    """The kind, as in the legend, of an event's name."""
    return next(kind for kind, words, _ in _KINDS if what.startswith(words))


def _draw(figure: Any, spans: list[Span], title: str) -> None:
    rows = sorted({span.row for span in spans}, key=lambda row: (row.startswith("copies"), row))
    figure.set_size_inches(10, 1.6 + 0.4 * len(rows))
    axes = figure.subplots()
    for kind, _, colour in _KINDS:
        mine = [span for span in spans if kind_of(span.what) == kind]
        for place, row in enumerate(rows):
            bars = [(s.begin, max(s.end - s.begin, 1e-3)) for s in mine if s.row == row]
            if bars:
                axes.broken_barh(bars, (place - 0.38, 0.76), facecolors=colour, linewidth=0)
        if mine:
            axes.plot([], [], color=colour, linewidth=6, label=kind)
    axes.set_yticks(range(len(rows)), rows)
    axes.invert_yaxis()
    axes.set_xlabel("microseconds")
    axes.set_title(title, loc="left", fontsize="medium")
    axes.legend(fontsize="small", frameon=False, loc="upper left", bbox_to_anchor=(1.01, 1.0))
