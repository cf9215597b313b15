"""The code of every page runs and prints what the page says; so do the commands."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import jax
import pages
import pytest

import stretto
import stretto.flax
from stretto.launch import cli
from stretto.launch.commands import on_cpus

OUTPUTS = pages.script("outputs")
COMMANDS = pages.script("commands")

ELSEWHERE = {
    "write/neighbours.md": "tests/kernels/test_kernels_page.py",
    "write/halo_exchange.md": "tests/kernels/test_tutorial.py",
    "write/missing_wait.md": "tests/distributed/simulator/test_walkthrough.py",
    "models/calls.md": "tests/kernels/test_operations_page.py",
    "models/attention.md": "tests/kernels/test_context_parallel_attention.py",
    "models/from_your_model.md": "tests/layers/test_from_your_model_page.py",
}
"""Pages that have a test of their own, which also breaks their kernels."""

HERE = [page for page in pages.with_code() if page not in ELSEWHERE]
SHOWN = [
    (str(path.relative_to(pages.DOCS)), command, text)
    for path in sorted(pages.DOCS.rglob("*.md"))
    for command, text in OUTPUTS.BLOCK.findall(path.read_text())
]
"""Page, command, and what the page says that it prints."""


@pytest.mark.parametrize("page", HERE)
def test_code_runs_and_prints_what_the_page_says(page: str) -> None:
    """The blocks of a page are one program, in their order."""
    namespace: dict[str, object] = {"__name__": "page"}
    commands = " ".join(command for shown_on, command, _ in SHOWN if shown_on == page).split()
    for code, wanted in pages.blocks(pages.DOCS / page):
        if "collective_matmul_mgpu.all" in code:  # run in test_jax_kernels.py
            continue
        if (file := re.match(r"# (\w+\.py)\n", code)) and file[1] in commands:
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, page, "exec"), namespace)
        assert wanted is None or printed.getvalue() == wanted, page
    jax.clear_caches()


@pytest.mark.parametrize(("page", "test"), ELSEWHERE.items())
def test_the_other_pages_are_read_by_their_tests(page: str, test: str) -> None:
    name = page.rsplit("/", 1)[1]
    helper = pages.ROOT / "tests" / "helpers" / "tutorial.py"
    assert name in (pages.ROOT / test).read_text() + helper.read_text()
    assert pages.blocks(pages.DOCS / page)


@pytest.mark.parametrize(("page", "command", "shown"), SHOWN, ids=[f"{p} {c}" for p, c, _ in SHOWN])
def test_commands_print_what_the_page_says(
    page: str,
    command: str,
    shown: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In this process, whose devices the scripts take four of."""
    OUTPUTS.write((pages.DOCS / page).read_text(), tmp_path)
    monkeypatch.chdir(tmp_path)
    program, *words = command.split()
    printed = io.StringIO()  # Of both streams, in their order on a terminal.
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        if program == "python":
            status = on_cpus.run(words[0], words[1:])
        else:
            devices = ["-n", str(jax.device_count())]
            words = [*words[:1], *devices, *words[3:]] if words[1] == "-n" else words
            status = cli.main(words)
    jax.clear_caches()
    assert status == 0
    assert printed.getvalue() == shown, "run docs/scripts/outputs.py"


def test_the_commands_page_is_their_help() -> None:
    assert (pages.DOCS / "reference" / "commands.md").read_text() == COMMANDS.page(), (
        "run docs/scripts/commands.py"
    )


def test_the_reference_has_every_public_name() -> None:
    text = "".join(path.read_text() for path in (pages.DOCS / "reference" / "api").glob("*.md"))
    named = set(re.findall(r"^::: \S*?(\w+)$", text, re.MULTILINE))
    assert not {*stretto.__all__, *stretto.flax.__all__} - named


def test_every_page_is_in_the_navigation() -> None:
    navigation = (pages.ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1]
    listed = set(re.findall(r"- (?:[\w ]+: )?([\w/-]+\.md)$", navigation, re.MULTILINE))
    found = {str(path.relative_to(pages.DOCS)) for path in pages.DOCS.rglob("*.md")}
    assert listed - {"CONTRIBUTING.md", "CHANGELOG.md"} == found


def test_ci_builds_the_site_strictly() -> None:
    """With `--quiet`, MkDocs counts no warnings, and a broken link passes."""
    (line,) = re.findall(r"^step site .*$", (pages.ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert "mkdocs build --strict" in line and "--quiet" not in line
