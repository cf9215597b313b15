"""The kernels of docs/write/neighbours.md do what it says; docs/write/toolbox.md is whole."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import jax
import pytest

from stretto.distributed import copies, kernel
from stretto.distributed.semaphores import SemaphoreArray
from stretto.distributed.simulator import DeadlockError, FindingError, simulate
from stretto.distributed.team import Team

WRITE = Path(__file__).parents[2] / "docs" / "write"
PAGE = (WRITE / "neighbours.md").read_text()
CODE, SECOND = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def run(code: str) -> str:
    """What the simulator says of it."""
    jax.clear_caches()
    with simulate() as report:
        exec(compile(code, "docs/write/neighbours.md", "exec"), {"__name__": "page"})
    return str(report)


def changed(old: str, new: str) -> str:
    assert CODE.count(old) == 1
    return CODE.replace(old, new)


def test_the_example_runs(capsys):
    report = run(CODE)
    wanted = re.search(r"```text\n(\[[^\n]*\]\n)(.*?), \.\.\.\n```", PAGE, re.DOTALL)
    assert wanted is not None
    assert capsys.readouterr().out == wanted[1]
    assert report.startswith(wanted[2]), report


def test_without_its_signal_it_would_hang():
    with pytest.raises(DeadlockError, match="received"):
        run(changed("        received.signal(peer_id=successor)\n", ""))


def test_a_store_that_has_only_been_read_is_a_race():
    with pytest.raises(FindingError):
        run(changed("wait_read_only=False", "wait_read_only=True"))


def test_the_second_needs_neither_an_inbox_nor_a_semaphore(capsys):
    report = run(f"{CODE}\n{SECOND}")
    assert report.splitlines()[1] == "nothing wrong found"
    printed = capsys.readouterr().out.splitlines()[1]
    assert f"It prints `{printed}`." in PAGE
    assert "symmetric" not in SECOND and "semaphore" not in SECOND


def test_the_second_without_its_wait_is_a_race():
    wait = "        plgpu.barrier_wait(loaded)\n"
    assert wait in SECOND
    with pytest.raises(FindingError):
        run(f"{CODE}\n{SECOND.replace(wait, '')}")


TABLES = (WRITE / "toolbox.md").read_text()


def words(*names) -> list[str]:
    return [name for name in names if not name.startswith("_")]


@pytest.mark.parametrize(
    ("heading", "names"),
    [
        ("launch(", words(*inspect.signature(kernel.launch).parameters)),
        ("block_id", [name for name, f in inspect.getmembers(kernel, inspect.isfunction)
                      if f.__module__ == kernel.__name__ and not name.startswith("_")]),
        ("Team", words(*vars(Team), "axes", "size")),
        ("SemaphoreArray", words(*SemaphoreArray.__dataclass_fields__, "size")),
        ("Semaphore", ["at", "signal", "wait"]),
        ("Pull", [*copies.Pull.__dataclass_fields__, "run"]),
        ("Place", list(copies.Place.__dataclass_fields__)),
        ("Push", [*copies.Push.__dataclass_fields__, "run"]),
        ("copies", words(*(name for name, f in inspect.getmembers(copies)
                           if getattr(f, "__module__", "") == copies.__name__))),
    ],
)  # fmt: skip
def test_the_tables_name_everything(heading, names):
    assert heading in TABLES and names
    spans = " ".join(re.findall(r"`([^`]+)`", TABLES))
    assert not [name for name in names if not re.search(rf"\b{name}\b", spans)]
