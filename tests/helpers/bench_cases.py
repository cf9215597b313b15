"""Cases of the benchmarks, by names."""

from __future__ import annotations

from stretto.benchmarks.cases.case import Case
from stretto.benchmarks.cases.shapes import operation_named, parse_shape


def case_of(
    kernel: str = "all_gather_matmul",
    shape: str = "64x32x32",
    devices: int = 2,
    dtype: str = "float32",
) -> Case:
    """The case of an operation, named, at a shape, spelt."""
    operation = operation_named(kernel)
    return Case(
        operation=operation, sizes=parse_shape(shape, operation), dtype=dtype, devices=devices
    )
