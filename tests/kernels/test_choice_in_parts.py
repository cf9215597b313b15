"""Which matmuls `auto` has in two parts: XLA's product, and a kernel for its collective."""

from __future__ import annotations

import pytest
from problems import problem

from stretto.kernels.choice import costs, products, speed
from stretto.kernels.operations import OPERATIONS
from stretto.kernels.problem.machine import Machine
from stretto.kernels.problem.problem import Problem
from stretto.kernels.problem.work import Work

H200 = Machine.of_kind("gpu", "NVIDIA H200")


def chosen(asked: Problem):
    operation = OPERATIONS[asked.operation]
    return speed.faster(operation, operation.kernels[0], asked)


@pytest.mark.parametrize(
    ("name", "sizes", "unfused"),
    [
        ("all_gather_matmul", (1000, 3072, 8200), False),  # 77.6 us; fused with copies 73.7.
        ("all_gather_matmul", (4096, 8192, 8200), False),  # 700 and 487.
        ("all_gather_matmul", (1000, 3070, 8200), False),  # No whole rows.
        ("all_gather_matmul", (64, 3072, 8200), False),  # Too short.
        ("all_gather_matmul", (8192, 520, 8200), True),  # Fused, more is copied than multiplied.
        ("matmul_reduce_scatter", (1000, 1032, 4096), False),  # By estimates 46 and 45.
    ],
)
def test_a_matmul_is_in_two_parts_where_its_collective_saves_enough(name, sizes, unfused):
    found = chosen(problem(*sizes, operation=name, devices=2, kind=H200.kind))
    assert (found.backend == "pallas" and found.config.unfused) == unfused


def is_unfused(name: str, *sizes: int) -> bool:
    found = chosen(problem(*sizes, operation=name, devices=2, kind=H200.kind))
    return found.backend == "pallas" and found.config.unfused


def test_products_of_few_rows_that_xla_divides_are_in_two_parts():
    """Two parts took 20 where XLA took 32, and 58 in place of 49 where XLA fills up beside NCCL."""

    assert is_unfused("all_gather_matmul_n", 46, 8105, 18)
    assert is_unfused("matmul_reduce_scatter", 12, 1200, 1886)
    assert not is_unfused("all_gather_matmul", 46, 5833, 4558)
    assert not is_unfused("all_gather_matmul_n", 527, 141, 454)


def test_a_tiny_product_is_of_cublas_with_more_kernels():
    """Scattered, two parts took 18 to 19 us where XLA took 28 to 33. Gathered and summed 16 to 17
    by XLA, which records what is around its collective."""
    assert products.is_tiny(8, 4, 10) and not products.is_tiny(8, 4, 17)
    assert not products.is_tiny(1, 3, 11)  # A vector.
    assert is_unfused("matmul_reduce_scatter", 8, 8, 10)
    assert is_unfused("matmul_reduce_scatter", 16, 4, 20)
    asked = [("matmul_all_reduce", 16, 4, 16), ("all_gather_matmul_n", 4, 2, 20)]
    for name, *sizes in asked:
        assert chosen(problem(*sizes, operation=name, devices=2, kind=H200.kind)).backend == "xla"


def test_products_that_end_while_the_host_launches_are_not_in_two_parts():
    """Of a contraction of 2461 two parts took 1.05 of XLA's time, of 4820 0.67."""
    assert not is_unfused("matmul_reduce_scatter", 18, 4922, 15599)
    assert is_unfused("matmul_reduce_scatter", 12, 9640, 2)
    assert is_unfused("all_gather_matmul", 16, 2432, 1552)  # XLA divides it: 26 and 33.


def test_short_shards_of_whole_messages_are_gathered_by_themselves():
    """Two parts took 19 and 20 us, the fused kernel 26 and 22, XLA 25 and 25."""
    assert is_unfused("all_gather_matmul_n", 532, 64, 232)
    assert is_unfused("all_gather_matmul_n", 192, 32, 16)
    assert is_unfused("all_gather_matmul", 160, 176, 3776)
    assert not is_unfused("all_gather_matmul_n", 16, 8, 336)  # No whole messages.


def test_few_rows_with_a_long_contraction_are_in_two_parts():
    """At nine such sizes two parts took 0.55 to 0.84 of XLA's time."""

    def is_unfused(name, *sizes):
        found = chosen(problem(*sizes, operation=name, devices=2, kind=H200.kind))
        return found.backend == "pallas" and found.config.unfused

    for sizes in ((16, 15184, 112), (36, 4648, 14), (4, 24968, 190), (700, 4140, 384)):
        assert is_unfused("matmul_reduce_scatter", *sizes)
        assert not is_unfused("matmul_all_reduce", *sizes)
    assert not is_unfused("matmul_reduce_scatter", 16, 2080, 8)
    assert not is_unfused("matmul_reduce_scatter", 1362, 13782, 39)
    assert is_unfused("all_gather_matmul", 4, 9420, 4)
    assert is_unfused("all_gather_matmul_n", 46, 8105, 18)
    assert not is_unfused("all_gather_matmul", 46, 5833, 4558)  # 1.2.


@pytest.mark.parametrize(
    ("sizes", "is_unfused"),
    [  # Sizes of the whole problem, and what two parts took of XLA's time.
        ((32, 16, 8), True),  # 0.90
        ((448, 16, 16), True),  # 0.90
        ((64, 400, 512), False),  # 1.07
        ((16, 15184, 112), False),  # 1.00
        ((8, 16, 1040), False),  # 1.3: no whole messages
        # No whole words, in sums of sizes that NCCL is slow at.
        ((349, 346, 843), True),  # 0.76
        ((19, 226, 14851), True),  # 0.81
        ((583, 194, 3533), True),  # 0.50
        ((45, 6, 5137), False),  # 1.3
    ],
)
def test_short_sums_in_two_parts(sizes, is_unfused):
    found = chosen(problem(*sizes, operation="matmul_all_reduce", devices=2, kind=H200.kind))
    assert (found.backend == "pallas" and found.config.unfused) == is_unfused


def test_the_kernel_gathers_misaligned_shards_as_fast_as_others():
    """XLA's gather is slow there: two parts took 61 where XLA took 92, and 38 where 58."""
    assert is_unfused("all_gather_matmul_n", 10, 4349, 1718)
    assert is_unfused("all_gather_matmul", 662, 5019, 6)


def test_copies_that_xla_records_cost_next_to_nothing():
    """By the host's launches, XLA 26 and 27 us, the fused kernel 18 and 20 (26 and 27 one by one);
    scattered, XLA 26 and 27, two parts 20 and 21."""
    asked = problem(10, 25, 6, operation="all_gather_matmul", devices=2, kind=H200.kind)
    found = chosen(asked)
    assert found.backend == "pallas" and not found.config.unfused
    assert found.fused_us < 0.9 * found.xla_us
    assert is_unfused("matmul_reduce_scatter", 32, 20, 2)
    assert is_unfused("matmul_reduce_scatter", 814, 6, 407)
    assert not is_unfused("matmul_reduce_scatter", 30, 6, 1)  # One kernel fewer.
    traffic = OPERATIONS["all_gather_matmul"].work(asked).traffic
    long = Work(product=(9000, 9001, 9003), traffic=traffic)
    assert costs.copies_launches_us(long, 2) > costs.copies_launches_us(long, 2, is_short=True)
