"""`--plot DIR`: every picture as a file, and as SVG for the report."""

from __future__ import annotations

import importlib.util
import io
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from stretto.benchmarks.errors import BenchmarkError
from stretto.benchmarks.measurements.results import Results
from stretto.benchmarks.pages import pictures

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# A colour that nothing else has: text and axes are drawn in it, then given the page's own.
_INK = "#010203"
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "stretto",
    "font.family": "sans-serif",
    "axes.facecolor": "none",
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
}


def available() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def check_available() -> None:
    """Raises BenchmarkError without matplotlib."""
    if not available():
        raise BenchmarkError(
            "pictures need matplotlib: install stretto[plots], or leave out --plot; the results"
            " file holds all that is drawn."
        )


def write_all(
    results: Results,
    folder: pathlib.Path,
    kinds: Sequence[str] = ("svg", "png"),
    beginnings: tuple[str, ...] = ("",),
) -> list[pathlib.Path]:
    """Writes the pictures whose names begin so into `folder`, in each kind; returns the files."""
    check_available()
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, figure in draw(results).items():
        for kind in kinds if name.startswith(beginnings) else ():
            path = folder / f"{name}.{kind}"
            _save(figure, path, kind, facecolor="white")
            written.append(path)
    return written


def figure(draw_it: Callable[[Figure], None]) -> Figure:
    """A figure in this package's style that `draw_it` draws on."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(_STYLE):
        made = Figure(figsize=(7.5, 3.8), layout="constrained")
        draw_it(made)
        return made


def save(made: Figure, path: pathlib.Path) -> None:
    """Writes a figure to `path` on white, in the format that its ending names."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _save(made, path, path.suffix.lstrip(".") or "svg", facecolor="white")


def inline(results: Results) -> dict[str, str]:
    """Every picture as SVG text that takes its ink from the page around it."""
    texts = {}
    for name, figure in draw(results).items():
        buffer = io.BytesIO()
        _save(figure, buffer, "svg", facecolor="none")
        texts[name] = _fit_into_page(buffer.getvalue().decode(), name)
    return texts


def draw(results: Results) -> dict[str, Figure]:
    """Every picture, by name."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(_STYLE):
        return pictures.all_pictures(
            results, lambda: Figure(figsize=(7.5, 3.8), layout="constrained")
        )


def _save(figure: Figure, target: pathlib.Path | io.BytesIO, kind: str, facecolor: str) -> None:
    import matplotlib as mpl

    with mpl.rc_context(_STYLE):
        # Without a date the same results give the same file.
        metadata = {"Date": None} if kind == "svg" else None
        figure.savefig(target, format=kind, facecolor=facecolor, dpi=150, metadata=metadata)


def _fit_into_page(svg: str, name: str) -> str:
    """Without prologue and fixed size, its ids its own, its ink the page's."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'<svg ([^>]*?)width="[^"]*"', r"<svg \1", svg, count=1)
    svg = re.sub(r'<svg ([^>]*?)height="[^"]*"', r"<svg \1", svg, count=1)
    svg = svg.replace("<svg ", f'<svg role="img" aria-label="{name}" ', 1)
    svg = re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{name}-", svg)
    return svg.replace(_INK, "currentColor")
