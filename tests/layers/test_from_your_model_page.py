"""Every swap of docs/models/from_your_model.md runs, and gives the numbers of what it replaces."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "models" / "from_your_model.md").read_text()
SETUP, *_ = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
SECTIONS = dict(re.findall(r"\n## ([^\n]+)\n(.*?)(?=\n## |\Z)", PAGE, re.DOTALL))


@pytest.mark.parametrize("title", SECTIONS)
def test_swap(title: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The section on training goes on with the model of the first."""
    first = next(iter(SECTIONS)) if title == "Training" else title
    blocks = [
        block
        for name in dict.fromkeys((first, title))
        for block in re.findall(r"```python\n(.*?)```", SECTIONS[name], re.DOTALL)
    ]
    assert blocks
    exec(
        compile("".join([SETUP, *blocks]), "from_your_model.md", "exec"),
        {"__name__": "page"},
    )
    wanted = len(re.findall(r"^same\(", "".join(blocks), re.MULTILINE))
    assert wanted and capsys.readouterr().out.splitlines().count("same") == wanted
