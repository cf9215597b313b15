"""The rooms of the benchmarks: imports point down, and none in a circle."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# From the lowest floor up; `errors.py` and `files.py` lie below them all, scripts above.
FLOORS = (
    "cases",
    "peers",
    "measurements",
    "timing",
    "targets",
    "links",
    "predict",
    "scaling",
    "pages",
    "sweeps",
    "never_slower",
    "commands",
)
LOWEST = {"errors", "files"}
SCRIPTS = {"__init__", "__main__", "across_nodes"}
PREFIX = "stretto.benchmarks."


def modules() -> dict[str, Path]:
    """The files of the benchmarks by dotted name, such as "timing.turns"."""
    files = sorted((ROOT / "benchmarks").rglob("*.py"))
    return {
        ".".join(path.relative_to(ROOT / "benchmarks").with_suffix("").parts): path
        for path in files
    }


def imported(source: str, names: set[str]) -> Iterator[str]:
    """Which of the modules `names` a file imports, also inside functions."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module:
            found = [f"{node.module}.{alias.name}" for alias in node.names] + [node.module]
        elif isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        else:
            continue
        yield from {name.removeprefix(PREFIX) for name in found} & names


def floor_of(module: str) -> int:
    """The floor of a module's room."""
    room, *rest = module.split(".")
    if not rest:
        return -1 if room in LOWEST else len(FLOORS)
    return FLOORS.index(room)


def breaches(module: str, source: str, names: set[str]) -> list[str]:
    """What a module imports from above its own room."""
    own = floor_of(module)
    return [name for name in imported(source, names) if floor_of(name) > own]


@pytest.mark.parametrize("module", modules())
def test_imports_point_down(module: str) -> None:
    assert not breaches(module, modules()[module].read_text(), set(modules()))


def test_no_imports_in_a_circle() -> None:
    files = modules()
    graph = {name: set(imported(path.read_text(), set(files))) for name, path in files.items()}
    assert list(graphlib.TopologicalSorter(graph).static_order())


def test_rooms_are_the_floors() -> None:
    rooms = {name.split(".")[0] for name in modules() if "." in name}
    alone = {name for name in modules() if "." not in name}
    assert (rooms, alone) == (set(FLOORS), LOWEST | SCRIPTS)


def test_an_import_from_above_is_caught() -> None:
    source = "def f():\n    from stretto.benchmarks.sweeps import run"
    assert breaches("timing.measure", source, set(modules())) == ["sweeps.run"]
    assert breaches("errors", "import stretto.benchmarks.cases.case", set(modules()))
    assert not breaches("commands.bench", source, set(modules()))
