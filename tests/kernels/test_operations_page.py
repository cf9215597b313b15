"""The examples of docs/models/calls.md run, and print what the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "models" / "calls.md").read_text()
SETUP = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)
EXAMPLES = {
    title: (code, text)
    for title, code, text in re.findall(
        r"\n## ([^\n]+)\n(?:(?!\n## ).)*?```python\n(.*?)```\n\n```text\n(.*?)```", PAGE, re.DOTALL
    )
}


def test_every_section_has_one():
    assert list(EXAMPLES) == re.findall(r"\n## ([^\n]+)", PAGE)


@pytest.mark.parametrize("title", EXAMPLES)
def test_example(title: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = EXAMPLES[title]
    assert SETUP is not None
    exec(compile(SETUP[1] + code, "docs/models/calls.md", "exec"), {"__name__": "page"})
    assert capsys.readouterr().out == text
