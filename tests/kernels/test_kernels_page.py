"""The kernel of docs/kernels.md does what the page says, and so do its bugs."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import pytest

from stretto.distributed.simulator import DeadlockError, FindingError, simulate

PAGE = (Path(__file__).parents[2] / "docs" / "kernels.md").read_text()
(CODE,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def run(code: str) -> str:
    """What the simulator says of it."""
    jax.clear_caches()
    with simulate() as report:
        exec(compile(code, "docs/kernels.md", "exec"), {"__name__": "page"})
    return str(report)


def changed(old: str, new: str) -> str:
    assert CODE.count(old) == 1
    return CODE.replace(old, new)


def test_the_example_runs(capsys):
    report = run(CODE)
    wanted = re.search(r"```text\n(\[.*\]\n)(.*), \.\.\.\n```", PAGE, re.DOTALL)
    assert wanted is not None
    assert capsys.readouterr().out == wanted[1]
    assert report.startswith(wanted[2]), report


def test_without_its_signal_it_would_hang():
    with pytest.raises(DeadlockError, match="received"):
        run(changed("        received.signal(peer_id=successor)\n", ""))


def test_a_store_that_has_only_been_read_is_a_race():
    with pytest.raises(FindingError):
        run(changed("wait_read_only=False", "wait_read_only=True"))
