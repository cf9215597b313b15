"""What is known of a GPU by its name."""

from __future__ import annotations

import pytest

from stretto.kernels.problem.machine import architecture_by_name


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
