"""Which GPUs a job sees: nvidia-smi's listing and CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path

import pytest

from stretto.launch.errors import LaunchError
from stretto.launch.planning import gpus
from stretto.launch.planning.gpus import (
    Listing,
    device_files,
    list_gpus,
    parse_listing,
    usable_gpus,
    visible,
)

LISTING = "".join(
    f"GPU {i}: NVIDIA H100 80GB HBM3 (UUID: GPU-{c * 4}-1)\n" for i, c in enumerate("abcd")
)
MIG = """GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-aaaa)
  MIG 3g.40gb     Device  0: (UUID: MIG-1111)
  MIG 3g.40gb     Device  1: (UUID: MIG-2222)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-bbbb)
"""


def test_listing():
    found = parse_listing(LISTING)
    assert [gpu.index for gpu in found] == [0, 1, 2, 3]
    assert (found[1].name, found[1].uuid) == ("NVIDIA H100 80GB HBM3", "GPU-bbbb-1")
    assert parse_listing("No devices found.\n") == ()


def fake_smi(folder: Path, text: str, status: int = 0, first: str = "") -> None:
    """An nvidia-smi that writes `text`; `first` is a line of shell."""
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{first}\ncat <<'E'\n{text}E\nexit {status}\n")
    tool.chmod(0o755)


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """`smi(text, status)` puts an nvidia-smi first on PATH."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return functools.partial(fake_smi, tmp_path)


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (18, "Failed to initialize NVML: Driver/library version mismatch"),
        (9, "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."),
        (6, "No devices were found"),
    ],
)
def test_driver_that_fails_is_no_machine_without_gpus(smi, status, words):
    smi(f"{words}\n", status)
    with pytest.raises(
        LaunchError, match=f"failed with status {status} .*{words[-20:-1]}"
    ) as error:
        usable_gpus({})
    assert "--platform cpu" in str(error.value)
    assert usable_gpus({"JAX_PLATFORMS": "cpu"}) == ()  # who asks for the CPU gets it


def test_no_driver_is_asked_where_no_gpu_may_be_seen(smi):
    smi("Failed to initialize NVML\n", 18)
    for limit in ("", "-1", "NoDevFiles"):
        assert usable_gpus({"CUDA_VISIBLE_DEVICES": limit}) == ()


def test_driver_that_hangs(smi, monkeypatch):
    smi("", first="sleep 9")
    monkeypatch.setattr(gpus, "NVIDIA_SMI_TIMEOUT_S", 0.2)
    with pytest.raises(LaunchError, match=r"gave no answer within 0\.2 s"):
        list_gpus()


LOST = "Unable to determine the device handle for GPU0000:04:00.0: Unknown Error\n"


def test_gpu_that_has_fallen_off_the_bus(smi):
    smi(LOST + LISTING)
    with pytest.raises(LaunchError, match=r"does not answer .*0000:04:00.0.*CUDA_VISIBLE_DEVICES"):
        usable_gpus({})
    assert [gpu.index for gpu in usable_gpus({"CUDA_VISIBLE_DEVICES": "1,2"})] == [1, 2]


def test_device_files_without_nvidia_smi(tmp_path):
    for name in ("nvidia0", "nvidia3", "nvidiactl", "nvidia-uvm", "nvidia10"):
        (tmp_path / name).touch()
    listing = Listing(device_files(tmp_path))
    assert [gpu.index for gpu in listing.gpus] == [0, 3, 10]
    assert len(visible(listing, "GPU-1234,GPU-5678")) == 2  # only CUDA could tell
    with pytest.raises(LaunchError, match="names '2', which is no GPU"):
        visible(listing, "2")


def test_mig_slices_stand_for_their_gpu():
    found = parse_listing(MIG)
    assert [(gpu.index, gpu.uuid, gpu.is_mig) for gpu in found] == [
        (0, "MIG-1111", True),
        (0, "MIG-2222", True),
        (1, "GPU-bbbb", False),
    ]


@pytest.mark.parametrize(
    ("limit", "indices"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("2", [2]),
        ("3,1", [3, 1]),
        ("GPU-cccc-1,GPU-a", [2, 0]),
        ("0,-1,1", [0]),
        ("NoDevFiles", []),
    ],
)
def test_visible(limit, indices):
    found = visible(Listing(parse_listing(LISTING)), limit)
    assert [gpu.index for gpu in found] == indices


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        ("0,9,1", "names '9', which is no GPU of this machine (0, 1, 2, 3)"),
        ("7,0", "names '7', which is no GPU"),
        ("1,1", "names '1' again of this machine"),
        ("GPU-eeee", "names 'GPU-eeee', which is no GPU"),
        ("cuda:0", "names 'cuda:0', which is no GPU"),
        ("all", "names 'all', which is no GPU"),
    ],
)
def test_visible_devices_that_are_not_there(limit, words):
    """CUDA would take the entries before it, or none at all, and say nothing."""
    with pytest.raises(LaunchError, match=re.escape(words)):
        visible(Listing(parse_listing(LISTING)), limit)


@pytest.mark.parametrize(
    ("environ", "count"),
    [
        ({}, 4),
        ({"JAX_PLATFORMS": "cuda"}, 4),
        ({"JAX_PLATFORMS": "cuda,cpu", "CUDA_VISIBLE_DEVICES": "0"}, 1),
        ({"JAX_PLATFORMS": "cpu"}, 0),
        ({"CUDA_VISIBLE_DEVICES": ""}, 0),
    ],
)
def test_usable(monkeypatch, environ, count):
    monkeypatch.setattr(gpus, "list_gpus", lambda: Listing(parse_listing(LISTING)))
    assert len(usable_gpus(environ)) == count
