"""What an operation has to have beside its record, and which of it one lacks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from compile_cases import CASES, COMPILED_BY
from subjects import SUBJECTS

import stretto
from stretto.benchmarks.cases.case import Case
from stretto.kernels.operation import Operation

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "models" / "operations.md"
DEVICES = 4


def lacking(record: Operation) -> Iterator[str]:
    """What `record` lacks, each with the way to have it."""
    public, name = record.public.__name__, record.name
    if public not in stretto.__all__ or getattr(stretto, public) is not record.public:
        yield f"public name: export {public} in src/stretto/__init__.py"
    if name not in SUBJECTS and not _has_test_file(name):
        yield f"test: write tests/kernels/test_{name}.py, or a subject in tests/helpers/subjects.py"
    if not re.search(rf"^\| `{public}\(.*\)` \|", PAGE.read_text(), re.MULTILINE):
        yield f"page: give {public} its line in the table of docs/models/operations.md"
    if COMPILED_BY.get(name) not in CASES:
        yield "compile case: name one in COMPILED_BY of tests/helpers/compile_cases.py"
    if not any(_cases(record)):
        yield "benchmark: give its examples shapes in one of their sets, and operands"


def _has_test_file(name: str) -> bool:
    file = ROOT / "tests" / "kernels" / f"test_{name}.py"
    return file.exists() and re.search(r"^ *def test_", file.read_text(), re.MULTILINE) is not None


def _cases(record: Operation) -> Iterator[Case]:
    """What `stretto bench` would time of it."""
    for name in record.examples.sets:
        for sizes in record.examples.shapes(name, DEVICES):
            if record.examples.operands(sizes, DEVICES):
                yield Case(operation=record, sizes=sizes, dtype="bfloat16", devices=DEVICES)
