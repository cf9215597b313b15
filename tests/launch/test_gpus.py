"""Which GPUs a job sees: nvidia-smi's listing and CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

import pytest

from stretto.launch.planning import gpus
from stretto.launch.planning.gpus import parse_listing, usable_gpus, visible

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
        ("0,9,1", [0]),
        ("0,-1,1", [0]),
        ("NoDevFiles", []),
        ("1,1", []),
    ],
)
def test_visible(limit, indices):
    assert [gpu.index for gpu in visible(parse_listing(LISTING), limit)] == indices


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
    monkeypatch.setattr(gpus, "list_gpus", lambda: parse_listing(LISTING))
    assert len(usable_gpus(environ)) == count
