"""What is known of a GPU by its name."""

from __future__ import annotations

import pytest

from stretto.kernels.problem.machine import architecture_by_name, is_rated


@pytest.mark.parametrize(
    ("kind", "architecture"),
    [
        ("NVIDIA H100 80GB HBM3", "sm_90"),
        ("NVIDIA H200", "sm_90"),
        ("NVIDIA H20-3e", "sm_90"),
        ("NVIDIA GH200 480GB", "sm_90"),
        ("h200", "sm_90"),
        ("NVIDIA B200", "sm_100"),
        ("NVIDIA H2000", ""),
        ("NVIDIA A100-SXM4-80GB", ""),
        ("", ""),
    ],
)
def test_architectures_by_names(kind, architecture):
    assert architecture_by_name(kind) == architecture


@pytest.mark.parametrize(
    ("kind", "rated"),
    [
        ("NVIDIA H100 80GB HBM3", True),
        ("NVIDIA H200", True),
        ("h200", True),
        ("NVIDIA H100 PCIe", False),
        ("NVIDIA H100 NVL", False),
        ("NVIDIA H200 NVL", False),
        ("NVIDIA H800", False),
        ("NVIDIA H20", False),
        ("NVIDIA GH200 480GB", False),
        ("NVIDIA B200", False),
    ],
)
def test_gpus_that_estimates_hold_for(kind, rated):
    assert is_rated(kind) == rated
