"""What descends from a process is found by its own children, or by a look at all processes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from stretto.launch.supervision import descendants

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")


@pytest.mark.parametrize("lists_children", [True, False], ids=["own children", "all processes"])
def test_process_in_a_session_of_its_own_is_found(monkeypatch, lists_children):
    if not lists_children:
        monkeypatch.setattr(descendants, "_children", lambda _: None)
    shell = subprocess.Popen(
        ["sh", "-c", "setsid sleep 60 & echo $!; wait"], stdout=subprocess.PIPE, text=True
    )
    assert shell.stdout is not None
    below = int(shell.stdout.readline())
    try:
        assert {shell.pid, below} <= set(descendants.of(os.getpid()))
    finally:
        os.kill(below, 9)
        shell.kill()
        shell.wait()
    assert shell.pid not in descendants.of(os.getpid())


def test_other_processes_of_the_machine_are_not_looked_at(monkeypatch):
    """A thousand agents of one machine would look at a thousand workers each."""
    if descendants._children(os.getpid()) is None:
        pytest.skip("this kernel does not list children")
    looked_at: list[int] = []
    true_children = descendants._children

    def children(pid: int) -> list[int] | None:
        looked_at.append(pid)
        return true_children(pid)

    monkeypatch.setattr(descendants, "_children", children)
    monkeypatch.setattr(descendants, "_by_all_processes", lambda _: pytest.fail("looked at all"))
    sleeper = subprocess.Popen(["sleep", "60"])
    try:
        assert sleeper.pid in descendants.of(os.getpid())
        assert set(looked_at) >= {os.getpid(), sleeper.pid}
    finally:
        sleeper.kill()
        sleeper.wait()
