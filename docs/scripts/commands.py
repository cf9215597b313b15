"""Writes docs/reference/commands.md: what each command says of itself.

    uv run python docs/scripts/commands.py

A test compares the page with the commands' help.
"""

from __future__ import annotations

import contextlib
import io
import textwrap
from pathlib import Path

PAGE = Path(__file__).parents[1] / "reference" / "commands.md"
COMMANDS = (
    *("run", "doctor", "simulate", "compile", "explain", "bench"),
    *(
        "bench show",
        "bench compare",
        "bench document",
        "bench links",
        "bench never-slower",
        "bench predicted",
    ),
    *("tune", "plan"),
)
WIDTH = 100
PLAIN = {"COLUMNS": str(WIDTH), "NO_COLOR": "1", "TERM": "dumb"}
"""Of the environment: a terminal of `WIDTH` columns without colours."""


def page() -> str:
    """The whole page."""
    from stretto.launch import cli

    parts = [
        "# Commands\n",
        f"```text\n{cli.usage()}\n```\n",
    ]
    for command in COMMANDS:
        parts += [f"## stretto {command}\n", f"```text\n{helped(command)}\n```\n"]
    parts.append("Written by `docs/scripts/commands.py` from each command's help; do not edit.\n")
    return "\n".join(parts)


def helped(command: str) -> str:
    """What `stretto COMMAND --help` prints, in lines of `WIDTH`."""
    from stretto.distributed import settings
    from stretto.launch import cli

    printed = io.StringIO()
    ended = contextlib.suppress(SystemExit)
    with settings.changed(PLAIN), contextlib.redirect_stdout(printed), ended:
        cli.main([*command.split(), "--help"])
    lines = printed.getvalue().strip().splitlines()
    return "\n".join(shorter for line in lines for shorter in _wrapped(line.rstrip()))


def _wrapped(line: str) -> list[str]:
    """A line that the help leaves longer than `WIDTH`, in several."""
    return textwrap.wrap(line, WIDTH, break_on_hyphens=False) if len(line) > WIDTH else [line]


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE}")
