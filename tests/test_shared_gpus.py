"""How many processes tests/gpu runs in, and how its limits of time follow."""

from __future__ import annotations

import os
import runpy
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture
def shared_conftest(pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch):
    """The conftest of a run of tests/gpu alone, on a machine of 64 cores."""
    module = pytestconfig.pluginmanager.get_plugin(str(HERE / "conftest.py"))
    monkeypatch.setattr(module, "_only_gpu_tests", lambda config: True)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)))
    monkeypatch.setattr(pytestconfig.option, "rehearse", False)
    return module


@pytest.mark.parametrize(("gpus", "processes"), [(1, 12), (2, 6), (4, 3), (8, 1), (16, 1)])
def test_auto_is_fewer_processes_where_more_gpus_take_turns(
    shared_conftest, pytestconfig, monkeypatch, gpus, processes
):
    monkeypatch.setattr(shared_conftest, "_number_of_gpus", lambda: gpus)
    assert shared_conftest.pytest_xdist_auto_num_workers(pytestconfig) == processes


def test_auto_is_no_more_than_the_cores(shared_conftest, pytestconfig, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3})
    monkeypatch.setattr(shared_conftest, "_number_of_gpus", lambda: 2)
    assert shared_conftest.pytest_xdist_auto_num_workers(pytestconfig) == 1


@pytest.mark.parametrize("other", ["no GPUs", "a rehearsal", "other tests"])
def test_auto_is_left_to_xdist_elsewhere(shared_conftest, pytestconfig, monkeypatch, other):
    monkeypatch.setattr(shared_conftest, "_number_of_gpus", lambda: 0 if other == "no GPUs" else 2)
    monkeypatch.setattr(pytestconfig.option, "rehearse", other == "a rehearsal")
    if other == "other tests":
        monkeypatch.setattr(shared_conftest, "_only_gpu_tests", lambda config: False)
    assert shared_conftest.pytest_xdist_auto_num_workers(pytestconfig) is None


@pytest.mark.parametrize(("workers", "seconds"), [(None, 12), ("1", 12), ("14", 168)])
def test_limits_grow_with_the_processes(monkeypatch, workers, seconds):
    if workers is None:
        monkeypatch.delenv("PYTEST_XDIST_WORKER_COUNT", raising=False)
    else:
        monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", workers)
    assert runpy.run_path(str(HERE / "helpers" / "patience.py"))["shared"](12) == seconds
