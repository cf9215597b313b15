"""`--plot DIR`: every picture as a file, and as SVG for the report."""

from __future__ import annotations

import importlib.util
import io
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from stretto.benchmarks import files
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


def check_available(option: str = "--plot") -> None:
    """Raises BenchmarkError without matplotlib, which the option needs."""
    if not available():
        raise BenchmarkError(
            f"pictures need matplotlib: install stretto[plots], or leave out {option}; JSON holds"
            " all that is drawn."
        )


def check_picture(option: str, path: pathlib.Path) -> None:
    """Raises BenchmarkError if a picture could not be drawn, or not into this file."""
    check_available(option)
    from matplotlib.backend_bases import FigureCanvasBase

    if _kind_of(path) not in FigureCanvasBase.get_supported_filetypes():
        raise BenchmarkError(f"{option} {path} is no picture's name; let it end in .svg or .png.")
    files.check_writable(option, path)


def write_all(
    results: Results,
    folder: pathlib.Path,
    kinds: Sequence[str] = ("svg", "png"),
    beginnings: tuple[str, ...] = ("",),
) -> list[pathlib.Path]:
    """Writes the pictures whose names begin so into `folder`, in each kind; returns the files."""
    check_available()
    written = []
    for name, figure in draw(results).items():
        for kind in kinds if name.startswith(beginnings) else ():
            path = folder / f"{name}.{kind}"
            files.write_whole(path, _drawn(figure, kind, facecolor="white"))
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
    files.write_whole(path, _drawn(made, _kind_of(path), facecolor="white"))


def _kind_of(path: pathlib.Path) -> str:
    return path.suffix.lstrip(".").lower() or "svg"


def inline(results: Results) -> dict[str, str]:
    """Every picture as SVG text that takes its ink from the page around it."""
    texts = {}
    for name, figure in draw(results).items():
        texts[name] = _fit_into_page(_drawn(figure, "svg", facecolor="none").decode(), name)
    return texts


def draw(results: Results) -> dict[str, Figure]:
    """Every picture, by name."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(_STYLE):
        return pictures.all_pictures(
            results, lambda: Figure(figsize=(7.5, 3.8), layout="constrained")
        )


def _drawn(figure: Figure, kind: str, facecolor: str) -> bytes:
    """A figure as a file of this kind."""
    import matplotlib as mpl

    buffer = io.BytesIO()
    with mpl.rc_context(_STYLE):
        # Without a date the same results give the same file.
        metadata = {"Date": None} if kind == "svg" else None
        figure.savefig(buffer, format=kind, facecolor=facecolor, dpi=150, metadata=metadata)
    return buffer.getvalue()


def _fit_into_page(svg: str, name: str) -> str:
    """Without prologue and fixed size, its ids its own, its ink the page's."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'<svg ([^>]*?)width="[^"]*"', r"<svg \1", svg, count=1)
    svg = re.sub(r'<svg ([^>]*?)height="[^"]*"', r"<svg \1", svg, count=1)
    svg = svg.replace("<svg ", f'<svg role="img" aria-label="{name}" ', 1)
    svg = re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{name}-", svg)
    return svg.replace(_INK, "currentColor")
