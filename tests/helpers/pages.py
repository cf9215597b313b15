"""The pages of the documentation: their blocks of code, and what they say that is printed."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
_BLOCK = re.compile(
    r"```python\n(.*?)```(?:\n\n(?:[^\n`#]+ prints\n\n)?```text\n(.*?)```)?", re.DOTALL
)


class Block(NamedTuple):
    """A block of Python, and the text that stands below it, None without one."""

    code: str
    printed: str | None


def blocks(page: Path) -> list[Block]:
    """The blocks of Python of a page, in their order."""
    return [Block(code, text or None) for code, text in _BLOCK.findall(page.read_text())]


def with_code() -> list[str]:
    """The pages that have blocks of Python, by their paths from docs/."""
    return [str(p.relative_to(DOCS)) for p in sorted(DOCS.rglob("*.md")) if blocks(p)]


def script(name: str) -> ModuleType:
    """A script of docs/scripts/, as a module."""
    spec = importlib.util.spec_from_file_location(name, DOCS / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
