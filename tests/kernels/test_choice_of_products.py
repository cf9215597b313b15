"""Estimates of products alone on one device, and choices that follow from them."""

from __future__ import annotations

import pytest

from stretto.kernels.choice import products, speed
from stretto.kernels.fused import all_gather_matmul_n
from stretto.kernels.operations import OPERATIONS
from stretto.kernels.problem.machine import Machine
from tests.helpers.problems import problem

H200 = Machine.of_kind("gpu", "NVIDIA H200")


def of_two(name: str, *sizes: int):
    return problem(*sizes, operation=name, devices=2, kind=H200.kind)


@pytest.mark.parametrize(
    ("sizes", "us"),
    [
        ((12966, 51, 14887), 234),
        ((15481, 218, 5663), 275),
        ((20678, 5, 12417), 212),
        ((30486, 1, 6259), 448),  # An outer product, which is no matmul.
        ((4898, 1, 10373), 120),
    ],
)
def test_results_beside_unaligned_rows_take_time(sizes, us):
    """XLA's matmuls alone, measured on an H200."""
    assert products.by_xla(*sizes, 2, 132) == pytest.approx(us, rel=0.2)


def test_a_step_takes_longer_beside_other_tiles():
    """On an H200 4 tiles of 128 columns took 0.24 us a step, 7 waves of them 0.46."""
    few, _ = products.by_kernel(8, 64 * 200, 464, 132, (128, 128))
    full, waves = products.by_kernel(128 * 132, 64 * 200, 128, 132, (128, 128))
    assert waves == 1 and 1.3 * few < full
    assert few / 200 == pytest.approx(0.3, abs=0.07)


def test_a_kernel_takes_as_long_as_the_waves_of_its_own_tiles():
    """145 tiles of 256 x 256 took 1.24 of XLA's time, as three waves of 66; a reduce-scatter."""
    _, waves = products.by_kernel(1104, 13536, 7184, 132, (256, 256))
    _, of_small = products.by_kernel(1104, 13536, 7184, 132, (128, 256))
    assert (waves, of_small) == (3, 2)
    asked = of_two("matmul_reduce_scatter", 1104, 27072, 7184)
    operation = OPERATIONS["matmul_reduce_scatter"]
    assert speed.faster(operation, operation.kernels[0], asked).backend == "xla"


@pytest.mark.parametrize(
    ("name", "sizes", "backend"),
    [  # Measured on two H200s: the kernel over XLA.
        ("matmul_all_reduce", (256, 1344, 10568), "pallas"),  # 0.73
        ("all_gather_matmul", (7200, 8, 1408), "xla"),  # 1.16: 16 rows of 8 numbers at once.
        ("all_gather_matmul_k", (1376, 21968, 16), "xla"),  # 1.09: 11 tiles wait for all columns.
        ("all_gather_matmul", (404, 10904, 7448), "pallas"),  # 0.62: rows of 8 bytes by XLA.
        ("matmul_all_reduce", (136, 288, 6656), "pallas"),  # 0.81
        ("matmul_all_reduce", (1448, 112, 8), "pallas"),  # 0.80
        ("matmul_all_reduce", (40, 96, 200), "pallas"),  # 0.74
        ("matmul_all_reduce", (281, 518, 8141), "xla"),  # 1.13: 4.6 MB are summed fast by NCCL.
        ("matmul_all_reduce", (104, 16, 10344), "xla"),  # 1.06: one row of tiles.
        ("all_gather_matmul_k", (2, 36608, 6056), "xla"),  # 3.8
    ],
)
def test_what_was_measured_is_what_is_chosen(name, sizes, backend):
    operation = OPERATIONS[name]
    assert speed.faster(operation, operation.kernels[0], of_two(name, *sizes)).backend == backend


def test_a_result_is_transposed_where_its_shards_of_columns_are_cut():
    _, whole = all_gather_matmul_n.transposed(of_two("all_gather_matmul_n", 8528, 16, 22176))
    _, cut = all_gather_matmul_n.transposed(of_two("all_gather_matmul_n", 8528, 16, 22174))
    assert whole == 16 * 11088 * 2
    assert cut == (16 * 11087 + 4264 * 22174) * 2


@pytest.mark.parametrize(
    ("sizes", "tile"),
    [  # Measured on two H200s: pairs over tiles of 64 columns.
        ((88, 3920, 4992), (256, 128)),  # 0.86
        ((62, 10961, 7430), (256, 128)),  # 0.92
        ((16, 3840, 304), (128, 64)),  # 1.17: 4 us are sent.
    ],
)
def test_pairs_serve_few_columns_that_wait_for_a_long_transfer(sizes, tile):
    found = all_gather_matmul_n.default_config(of_two("all_gather_matmul_n", *sizes))
    assert (found.tiles.tile_m, found.tiles.tile_n) == tile
