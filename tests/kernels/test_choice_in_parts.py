"""Which matmuls `auto` has in two parts: XLA's product, and a kernel for its collective."""

from __future__ import annotations

import pytest
from problems import problem

from stretto.kernels.choice import products, speed
from stretto.kernels.operations import OPERATIONS
from stretto.kernels.problem.machine import Machine
from stretto.kernels.problem.problem import Problem

H200 = Machine.of_kind("gpu", "NVIDIA H200")


def chosen(asked: Problem):
    operation = OPERATIONS[asked.operation]
    return speed.faster(operation, operation.kernels[0], asked)


def is_unfused(name: str, *sizes: int) -> bool:
    found = chosen(problem(*sizes, operation=name, devices=2, kind=H200.kind))
    return found.backend == "pallas" and found.config.unfused


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("all_gather_matmul", (1000, 3072, 8200)),  # 77.6 us; fused with copies 73.7.
        ("all_gather_matmul", (4096, 8192, 8200)),  # 700 and 487.
        ("all_gather_matmul", (1000, 3070, 8200)),  # No whole rows.
        ("matmul_reduce_scatter", (1000, 1032, 4096)),
    ],
)
def test_a_matmul_is_fused_where_its_product_hides_the_transfer(name, sizes):
    assert not is_unfused(name, *sizes)


def test_products_of_few_rows_that_xla_divides_are_in_two_parts():
    """Two parts took 20 where XLA took 32, and 58 in place of 49 where XLA fills up beside NCCL."""

    assert is_unfused("all_gather_matmul_n", 46, 8105, 18)
    assert is_unfused("matmul_reduce_scatter", 12, 1200, 1886)
    assert not is_unfused("all_gather_matmul", 46, 5833, 4558)


@pytest.mark.parametrize(
    ("name", "sizes", "is_faster"),
    [  # What two parts took of XLA's time, which records the kernels of a divided product.
        ("all_gather_matmul", (48, 6256, 16), True),  # 0.78
        ("all_gather_matmul_n", (16, 13696, 16), True),  # 0.76
        ("matmul_reduce_scatter", (78, 1026, 17), True),  # 0.82
        ("matmul_reduce_scatter", (610, 1538, 5), True),  # 0.81
        ("all_gather_matmul_n", (480, 10928, 48), False),  # 1.15: NCCL's launches hide it.
        ("matmul_reduce_scatter", (122, 29910, 119), False),  # 1.17
        ("matmul_all_reduce", (119, 20262, 281), False),  # 1.06
    ],
)
def test_a_divided_product_is_in_two_parts_while_it_is_short(name, sizes, is_faster):
    assert is_unfused(name, *sizes) == is_faster


def test_a_tiny_product_is_of_cublas_and_xla_records_all_of_it():
    """Scattered, two parts took 17.6 where XLA took 17.0, gathered and summed 1.02 to 1.9 of XLA's
    time."""
    assert products.is_tiny(8, 4, 10) and not products.is_tiny(8, 4, 17)
    assert not products.is_tiny(1, 3, 11)  # A vector.
    assert not products.is_tiny(38, 1, 3)  # An outer product.
    asked = [
        ("matmul_reduce_scatter", 24, 4, 2),
        ("matmul_all_reduce", 16, 4, 16),
        ("all_gather_matmul_n", 4, 2, 20),
    ]
    for name, *sizes in asked:
        assert chosen(problem(*sizes, operation=name, devices=2, kind=H200.kind)).backend == "xla"


def test_an_outer_product_is_not_in_two_parts():
    """1.10 and 0.95 of XLA's time, where the fused kernel took 1.30 and 0.87."""
    assert not is_unfused("matmul_all_reduce", 1, 2, 27)
    assert not is_unfused("all_gather_matmul_n", 62, 1, 1778)


def test_products_that_end_while_the_host_launches_are_not_in_two_parts():
    """Of a contraction of 2461 two parts took 1.05 of XLA's time, of 4820 0.67."""
    assert not is_unfused("matmul_reduce_scatter", 18, 4922, 15599)
    assert is_unfused("matmul_reduce_scatter", 12, 9640, 2)
    assert is_unfused("all_gather_matmul", 16, 2432, 1552)  # XLA divides it: 26 and 33.


def test_short_shards_of_whole_messages_are_gathered_by_themselves_where_a_kernel_copies():
    """Two parts took 19, the fused kernel 26, XLA 25. Without copies the kernel takes 16 to 18."""
    assert is_unfused("all_gather_matmul_n", 532, 64, 232)
    assert not is_unfused("all_gather_matmul_n", 192, 32, 16)
    assert not is_unfused("all_gather_matmul_n", 16, 8, 336)


@pytest.mark.parametrize(
    ("sizes", "is_faster"),
    [  # Sizes of the whole problem, and what two parts took of XLA's time.
        ((4, 9064, 64), True),  # 0.88: whole messages, and recorded.
        # 0.94, and 1.06 to 1.11 at such sizes where the host is fast.
        ((25, 306, 719), False),
        ((6000, 28, 6), False),
        ((207, 10, 2363), True),  # 0.68: NCCL is slow there, as at the next three.
        ((349, 346, 843), True),  # 0.76
        ((19, 226, 14851), True),  # 0.81
        ((583, 194, 3533), True),  # 0.50
        ((287, 870, 8945), False),  # 1.17: 5 MB are copied to whole rows.
        ((600, 736, 16), False),  # 1.05: recorded, and copied.
    ],
)
def test_sums_in_two_parts(sizes, is_faster):
    assert is_unfused("matmul_all_reduce", *sizes) == is_faster


def test_the_kernel_gathers_misaligned_shards_as_fast_as_others():
    """XLA's gather is slow there: kernels took 61 where XLA took 92, and 38 where 58."""
    for name, sizes in (("_n", (10, 4349, 1718)), ("", (662, 5019, 6))):
        asked = problem(*sizes, operation=f"all_gather_matmul{name}", devices=2, kind=H200.kind)
        assert chosen(asked).backend == "pallas"


def test_the_host_limits_short_calls():
    """Copies of both operands and the result: 22 to 24 us fused, 20 to 24 in two parts, XLA 24 to
    28. No copies: 16 to 18 fused."""
    two_h200s = dict(devices=2, kind=H200.kind)
    copied = chosen(problem(36, 95, 22, operation="all_gather_matmul", **two_h200s))
    whole = chosen(problem(16, 16, 144, operation="all_gather_matmul", **two_h200s))
    assert copied.backend == whole.backend == "pallas"
    assert copied.fused_us == pytest.approx(23, rel=0.1)
    assert (whole.fused_us or 0.0) < 0.8 * (copied.fused_us or 0.0)
    assert copied.xla_us == pytest.approx(26, rel=0.1) == whole.xla_us
