"""The collectives on GPUs: what XLA's give, of any size and type."""

from __future__ import annotations

import collective_checks as checks
import fused_cases as cases
import pytest

# Rows x columns of a device: less than a row of 512 bytes, odd, and 16 MB.
SHAPES = [(4, 1), (12, 129), (256, 1000), (2048, 4096)]
everywhere = pytest.mark.parametrize("name", checks.CALLS)


@pytest.mark.gpu(4)
@everywhere
def test_shapes_and_types(name: str) -> None:
    shapes = [(shape, "bfloat16") for shape in SHAPES]
    types = [((64, 136), dtype) for dtype in checks.dtypes_of(name)]
    found = checks.compare(name, cases.mesh_of(4), [*shapes, *types])
    assert not found, "\n".join(found)


@pytest.mark.parametrize("devices", [pytest.param(n, marks=pytest.mark.gpu(n)) for n in (2, 3, 8)])
@everywhere
def test_other_numbers_of_devices(name: str, devices: int) -> None:
    found = checks.compare(name, cases.mesh_of(devices), [((24 * devices, 130), "bfloat16")])
    assert not found, "\n".join(found)
