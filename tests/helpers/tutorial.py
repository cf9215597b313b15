"""The files of docs/write/halo_exchange.md, and what the page says that its commands print."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs" / "write" / "halo_exchange.md").read_text()
_BLOCK = re.compile(r"```(python|text)\n(.*?)```", re.DOTALL)


def files() -> dict[str, str]:
    """The text of each file by its name: all blocks that name it, in their order."""
    found: dict[str, list[str]] = {}
    for kind, text in _BLOCK.findall(PAGE):
        if kind == "python":
            heading, code = text.split("\n", 1)
            found.setdefault(heading.removeprefix("# "), []).append(code)
    return {name: "\n\n".join(blocks) for name, blocks in found.items()}


def outputs() -> list[str]:
    """What the commands print, in the order of the page."""
    return [text for kind, text in _BLOCK.findall(PAGE) if kind == "text"]


def write(folder: Path) -> None:
    """Writes the files to `folder`."""
    for name, text in files().items():
        (folder / name).write_text(text)
