"""What the documents say is so: links lead somewhere, commands exist, and the first code runs."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import jax
import pytest

from stretto.launch import cli

ROOT = Path(__file__).parents[1]
PAGES = [
    str(page.relative_to(ROOT))
    for page in [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
]
README = (ROOT / "README.md").read_text()


def broken_links(text: str, page: Path) -> list[str]:
    """Relative targets of Markdown links in `text` that are no file beside `page`."""
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", text)
    return [t for t in targets if "://" not in t and not (page.parent / t).exists()]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    assert not broken_links((ROOT / page).read_text(), ROOT / page)


def test_broken_link_is_caught() -> None:
    assert broken_links("[a](no/such.md)", ROOT / "README.md") == ["no/such.md"]


@pytest.mark.parametrize("page", PAGES)
def test_named_files_exist(page: str) -> None:
    """Paths in code spans and commands, such as `examples/x.py`."""
    folders = "distributed|kernels|launch|benchmarks|configs|tests|examples|docker|docs|src"
    text = (ROOT / page).read_text()
    named = re.findall(rf"(?<![\w/.-])((?:{folders})/[\w/-]+\.(?:py|toml|md))\b", text)
    assert not [name for name in named if not (ROOT / name).exists()]


def test_first_code_of_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    code = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert code is not None
    exec(compile(code[1], "README.md", "exec"), {"__name__": "readme"})
    spec, shape = capsys.readouterr().out.splitlines()
    assert "'tp'" in spec and shape == "(512, 2048)"
    assert len(jax.devices()) > 1


def test_readme_names_the_two_commands() -> None:
    assert "\nuv run stretto run -n 4 examples/tensor_parallel_mlp.py\n" in README
    assert "\nuv run pytest\n" in README
    assert README.index("<!-- times -->") < README.index("<!-- /times -->")


@pytest.mark.parametrize("page", PAGES)
def test_named_options_exist(page: str) -> None:
    """Every `stretto COMMAND --option` in a page is one that the command has."""
    text = (ROOT / page).read_text()
    commands = r"stretto (run|doctor|bench|plan|tune|simulate|compile|explain)((?: [^`\n|#]*)?)"
    verbs = r" (show|compare|document|links|predicted|never-slower)\b"
    for command, rest in re.findall(commands, text):
        own = rest.split(".py")[0]  # what follows a script is the script's
        verb = re.match(verbs, own) if command == "bench" else None
        words = (command, verb[1]) if verb else (command,)
        for option in re.findall(r"(?<!\S)(--[a-z][a-z-]+)", own):
            assert option in _help(words), f"stretto {' '.join(words)} {option}"


_HELP: dict[tuple[str, ...], str] = {}


def _help(command: tuple[str, ...]) -> str:
    if command not in _HELP:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            cli.main([*command, "--help"])
        _HELP[command] = printed.getvalue()
    return _HELP[command]
