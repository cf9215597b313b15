"""What `auto` takes for groups of rows on one device, and the estimates that it rests on."""

from __future__ import annotations

import pytest

from stretto.kernels.choice import groups, speed, transfers
from stretto.kernels.operations import OPERATIONS
from stretto.kernels.problem.machine import Machine
from stretto.kernels.problem.problem import Problem, Types

GROUPED = OPERATIONS["grouped_matmul"]
H200 = Machine.of_kind("gpu", "NVIDIA H200")


def grouped(*sizes: int) -> Problem:
    """Rows, contraction, columns and groups."""
    return Problem(
        operation=GROUPED.name,
        sizes=dict(zip("mkng", sizes, strict=True)),
        types=Types(lhs="bfloat16", rhs="bfloat16", out="bfloat16"),
        devices=1,
        machine=H200,
    )


@pytest.mark.parametrize(
    ("sizes", "backend"),
    [  # What the kernel took of XLA's time.
        ((10968, 192, 32, 10), "pallas"),  # 0.37
        ((1473, 3403, 3, 6), "pallas"),  # 0.53
        ((219, 13743, 3369, 1), "pallas"),  # 0.67
        ((65, 12377, 435, 44), "pallas"),  # 0.81
        ((1616, 4152, 6192, 3), "pallas"),  # 0.76
        ((3686, 2556, 464, 5), "pallas"),  # 0.36
        ((2, 2322, 5456, 6), "pallas"),  # 0.78: of six matrices two are read at most.
        ((1584, 398, 144, 8), "pallas"),  # 0.78: the host launches its copies beside a kernel.
        ((361, 41, 1547, 40), "xla"),  # 1.14
        ((3405, 3, 3269, 3), "xla"),  # 1.00
        ((83, 5209, 1179, 2), "xla"),  # 1.11
        ((92, 3730, 3264, 11), "xla"),  # 1.10
        ((3224, 24, 8, 39), "xla"),  # 1.17
        ((304, 5104, 64, 1), "xla"),  # 2.9
        ((4, 2, 13494, 16), "xla"),  # 7.0
    ],
)
def test_what_was_measured_is_what_is_chosen(sizes, backend):
    assert speed.faster(GROUPED, GROUPED.kernels[0], grouped(*sizes)).backend == backend


@pytest.mark.parametrize(
    ("sizes", "kernel_us", "xla_us"),
    [
        ((10968, 192, 32, 10), 16.9, None),
        ((24, 2952, 8, 10), 32.1, None),
        ((4, 2, 13494, 16), 53.4, None),
        ((6479, 581, 11, 25), None, 197.6),
        ((10032, 2776, 8, 11), None, 591.9),
        ((3686, 2556, 464, 5), None, 142.9),
        ((1616, 4152, 6192, 3), None, 349.8),
    ],
)
def test_estimates_are_near_measured_times(sizes, kernel_us, xla_us):
    """Of the kernel where nothing is copied, the time of copies being another estimate."""
    found = transfers.estimate(GROUPED, grouped(*sizes))
    for estimated, measured in zip(found, (kernel_us, xla_us), strict=True):
        assert measured is None or estimated == pytest.approx(measured, rel=0.25)


def test_xla_multiplies_all_rows_by_all_groups():
    few, many = (groups.by_xla(8192, 1024, 1024, count, 2, 132) for count in (1, 16))
    assert many > 7 * few
    assert groups.by_kernel(8192, 1024, 1024, 16, 2, 132) < 0.5 * many


@pytest.mark.parametrize(
    ("sizes", "columns"),
    [  # Waves of 132 tiles of 128 and of 256 columns, and the times with both.
        ((4342, 16106, 1294, 15), 128),  # 4 and 3: 705 and 831.
        ((361, 41, 1547, 40), 128),  # 5 and 3: 32 and 33.
        ((1616, 4152, 6192, 3), 256),  # 6 and 3: 276 and 266.
        ((1734, 5724, 5812, 39), 256),  # 19 and 10: 2255 and 2204.
    ],
)
def test_tiles_are_as_narrow_as_their_waves_ask_for(sizes, columns):
    assert GROUPED.kernels[0].default(grouped(*sizes)).tiles.tile_n == columns
