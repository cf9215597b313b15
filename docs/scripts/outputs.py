"""Writes what commands print into the pages that show it.

    uv run python docs/scripts/outputs.py [PAGE...]

A page marks such a block by a comment before it: `<!-- command: stretto explain ... -->`. The
command runs in a folder with the files of the page: blocks of Python whose first line is
`# NAME.py`; blocks of one name are joined. A test runs the commands and compares.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from stretto.launch import environment

DOCS = Path(__file__).parents[1]
BLOCK = re.compile(r"<!-- command: (.+?) -->\n```text\n(.*?)```", re.DOTALL)
FILE = re.compile(r"```python\n# (\w+\.py)\n(.*?)```", re.DOTALL)
DEVICES = 4


def files(text: str) -> dict[str, str]:
    """The files of a page, by their names."""
    found: dict[str, str] = {}
    for name, code in FILE.findall(text):
        found[name] = f"{found[name]}\n\n{code}" if name in found else code
    return found


def write(text: str, folder: Path) -> None:
    """Writes the files of a page to `folder`."""
    for name, code in files(text).items():
        (folder / name).write_text(code)


def output(command: str, text: str) -> str:
    """What `command` prints, as on a terminal, in a folder with the files of the page `text`."""
    program, *rest = command.split()
    start = [sys.executable] if program == "python" else [sys.executable, "-m", "stretto.launch"]
    variables = environment.current()
    variables |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(DEVICES)}
    variables["PYTHONUNBUFFERED"] = "1"  # So that both streams keep their common order.
    variables.pop("XLA_FLAGS", None)
    with tempfile.TemporaryDirectory() as folder:
        write(text, Path(folder))
        done = subprocess.run(
            [*start, *rest],
            cwd=folder,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    return done.stdout


def main(names: list[str]) -> None:
    """Rewrites the blocks of the named pages, of all without names."""
    pages = [Path(name) for name in names] or sorted(DOCS.rglob("*.md"))
    for path in pages:
        text = path.read_text()
        new = rewritten(text)
        if new != text:
            path.write_text(new)
            print(f"wrote {path}")


def rewritten(text: str) -> str:
    """The page `text` with what its commands print now."""

    def block(old: re.Match[str]) -> str:
        return f"<!-- command: {old[1]} -->\n```text\n{output(old[1], text)}```"

    return BLOCK.sub(block, text)


if __name__ == "__main__":
    main(sys.argv[1:])
