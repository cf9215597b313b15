"""`stretto bench predicted`: how well the model of time predicts what was measured."""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from typing import Annotated

import tyro
from tyro.conf import arg

from stretto.benchmarks import files
from stretto.benchmarks.pages import predicted
from stretto.benchmarks.predict import over_nodes
from stretto.benchmarks.predict.samples import committed


@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictedOptions:
    """Show predicted times beside the measured ones of the results that Stretto ships."""

    page: Annotated[pathlib.Path | None, arg(metavar="FILE")] = None
    """Write every case into this page, such as docs/results/predicted.md."""
    scaling: Annotated[pathlib.Path | None, arg(metavar="FILE")] = None
    """Write the summary and planned steps between this page's markers: docs/measure/planning.md."""
    check: bool = False
    """Write nothing; exit with status 1 if a page would change."""


def main(argv: list[str]) -> int:
    """Runs `stretto bench predicted ARGV`; 0, or 1 if `--check` finds a page out of date."""
    options = tyro.cli(PredictedOptions, prog="stretto bench predicted", args=argv)
    if options.page is None and options.scaling is None:
        print(predicted.summary_table())
        return 0
    wanted: dict[pathlib.Path, str] = {}
    if options.page is not None:
        wanted[options.page] = predicted.page(_names())
    if options.scaling is not None:
        wanted[options.scaling] = _scaling(options.scaling)
    stale = [path for path, text in wanted.items() if not files.holds(path, text)]
    for path in stale:
        if options.check:
            print(
                f"{path} is not what the model says; run stretto bench predicted", file=sys.stderr
            )
        else:
            files.write_whole(path, wanted[path].encode())
            print(f"wrote {path}")
    return int(options.check and bool(stale))


def _names() -> list[str]:
    """The results files, as the page names them."""
    over_several = [f"nodes/{path.name}" for path in over_nodes.committed()]
    return [*(path.name for path in committed()), *over_several]


def _scaling(path: pathlib.Path) -> str:
    text = files.read_text(path, "see --scaling")
    text = predicted.between(text, "fitted", predicted.fitted_table(), str(path))
    text = predicted.between(text, "checked", predicted.summary_table(), str(path))
    return predicted.between(text, "planned", predicted.planned_table(), str(path))
