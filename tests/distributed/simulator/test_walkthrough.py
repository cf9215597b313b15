"""The walk-through of docs/write/missing_wait.md: its kernel, its mistake, and what mends it."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from stretto.distributed.simulator import DeadlockError, FindingError, simulate

PAGE = (Path(__file__).parents[3] / "docs" / "write" / "missing_wait.md").read_text()
CODE = next(c for c in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "def shift" in c)
STORE = "        plgpu.copy_smem_to_gmem(rows, copies.remote(inbox_ref, team, successor))\n"
SIGNAL = "        received.signal(peer_id=successor)\n"


@pytest.fixture
def run(tmp_path):
    def run(code, **settings):
        path = tmp_path / "shift.py"
        path.write_text(code)
        with simulate(**settings) as report:
            runpy.run_path(str(path), run_name="__main__")
        return report

    return run


def told(kind):
    """The block of output on the page that begins with `kind`, without counts of how often."""
    [block] = [b for b in re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL) if b.startswith(kind)]
    return re.sub(r" \(seen \d+ times\)", "", block).strip()


def test_the_race_is_found_and_told_as_on_the_page(run):
    with pytest.raises(FindingError) as caught:
        run(CODE, seed=3)
    text = re.sub(r"\S*/shift\.py", "shift.py", str(caught.value))
    _, first, second, *_ = told("[race]").splitlines()
    for line in (first, second):  # Which devices are told of depends on the seed.
        pattern = r"device \d".join(map(re.escape, re.split(r"device \d", line.strip())))
        assert re.search(pattern, text), text


def test_the_wait_before_the_signal_mends_it(run, capsys):
    right = CODE.replace(STORE, STORE + "        plgpu.wait_smem_to_gmem(0)\n")
    for seed in range(20):
        assert run(right, seed=seed, from_the_end=seed % 4 > 1).ok
    assert capsys.readouterr().out == "right\n" * 20


def test_without_the_signal_it_hangs_as_on_the_page(run):
    with pytest.raises(DeadlockError) as caught:
        run(CODE.replace(SIGNAL, ""))
    said = told("deadlock").splitlines()
    text = str(caught.value)
    assert said[2].strip() in text and said[4].strip() in text and "received.wait()" in text
