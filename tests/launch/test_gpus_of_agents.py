"""What an agent finds of its process's GPUs before a script starts."""

from __future__ import annotations

import pytest

from stretto.launch.planning import gpus
from stretto.launch.supervision import gpu_checks

FOUR = gpus.Listing(tuple(gpus.Gpu(i, "H100", f"GPU-{i}") for i in range(4)))
KEPT = {0: {0, 1}, 1: {2, 3}}


@pytest.fixture(autouse=True)
def host(monkeypatch):
    """A host with four GPUs; the cores that the agent kept to are in the list."""
    kept: list[set[int]] = []
    monkeypatch.setattr(gpus, "list_gpus", lambda: FOUR)
    monkeypatch.setattr(
        gpu_checks, "cores_beside", lambda found: KEPT.get(found[0].index) if found else None
    )
    monkeypatch.setattr(gpu_checks, "keep_to", lambda cores: kept.append(cores) or True)
    return kept


def take(devices, sent=None, bind="auto", **environ):
    message = {"devices": devices, "cuda_visible_devices": sent, "bind": bind}
    return gpu_checks.take_gpus(message, environ)


def test_process_is_kept_beside_its_gpus(host):
    assert take([1]) is None
    assert take([0], sent="1,2") is None  # number 0 of those is GPU 1
    assert take([0], CUDA_VISIBLE_DEVICES="1") is None  # the host's own
    assert host == [KEPT[1]] * 3
    assert take([1], bind="none") is None
    assert len(host) == 3


def test_host_that_does_not_say(host):
    assert take([2]) is None
    assert "does not say which cores are beside its GPUs" in str(take([2], bind="numa"))
    assert host == []


@pytest.mark.parametrize(
    ("devices", "sent", "words"),
    [
        ([0, 4], None, "has 4 GPUs that a job can use, and number 4 was planned there"),
        ([1], "3", "has 1 GPUs that a job can use, and number 1 was planned"),
        ([0], "", "has 0 GPUs that a job can use"),
        ([0], "9", "names '9', which is no GPU of host"),
    ],
)
def test_gpus_that_are_not_there(devices, sent, words):
    assert words in str(take(devices, sent))
