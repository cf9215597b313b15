"""What `auto` takes at sizes whose kernels need copies, or at which XLA's matmul is slow."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest
from problems import entry, problem

from stretto.kernels.choice import costs, products, speed, tables, transfers
from stretto.kernels.choice.tables import Table
from stretto.kernels.collectives import row_layout
from stretto.kernels.operations import OPERATIONS
from stretto.kernels.problem.machine import Machine
from stretto.kernels.problem.problem import Problem, Types
from stretto.kernels.problem.work import Work

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
H200 = Machine.of_kind("gpu", "NVIDIA H200")


def collective(name: str, m: int, n: int, devices: int = 2) -> Problem:
    """One of H200s, `[m, n]` on each."""
    types = Types(lhs="bfloat16", out="bfloat16")
    return Problem(operation=name, sizes=dict(m=m, n=n), types=types, devices=devices, machine=H200)


def chosen(asked: Problem):
    operation = OPERATIONS[asked.operation]
    return speed.faster(operation, operation.kernels[0], asked)


@pytest.mark.parametrize("size", [8, 256, 257, 1024, 64 * 256, 65 * 256, 80 * 256, 12928 * 8])
def test_what_is_in_rows_is_not_copied(size):
    def rows(x):
        return row_layout.to_rows(x, 1)

    jaxpr = jax.make_jaxpr(rows)(jax.ShapeDtypeStruct((size,), jnp.bfloat16))
    is_padded = any(equation.primitive.name in ("pad", "jit", "pjit") for equation in jaxpr.eqns)
    assert row_layout.is_in_rows(size, jnp.bfloat16) == (not is_padded)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_copies_are_counted_where_parts_are_not_in_rows(name):
    kernel = OPERATIONS[name].kernels[0]
    results = {"all_gather": 2, "reduce_scatter": 0.5}.get(name, 1)
    assert kernel.copies(collective(name, 64, 2048), None) == 0
    assert kernel.copies(collective(name, 64, 2040), None) == 64 * 2040 * 2 * (1 + results)


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("sizes", [(6, 276), (4740, 11952), (240, 1000), (2, 1206)])
def test_a_collective_whose_parts_are_copied_is_xla(name, sizes):
    """At 2 H200s kernels with copies took 1.05 to 1.5 of XLA's time at such sizes."""
    found = chosen(collective(name, *sizes))
    assert found.backend == "xla" and "MiB are copied to whole rows and back" in found.reason


def test_copies_beside_short_collectives_must_save_more():
    """A reduce-scatter of 5.8 MB with rows of 522 bytes took 1.2 of XLA's time by the kernel, an
    all-to-all of 41736 x 14 1.12."""
    for name, sizes in (("reduce_scatter", (11046, 261)), ("all_to_all", (41736, 14))):
        found = chosen(collective(name, *sizes))
        assert found.backend == "xla" and found.fused_us < 0.95 * found.xla_us


def test_a_sum_that_is_slow_by_xla_is_copied_for_the_kernel():
    """0.92 MB of no whole words took 30.6 us by XLA, 25.4 by the kernel. Whole words XLA sums."""
    assert chosen(collective("all_reduce", 5965, 77)).backend == "pallas"
    assert chosen(collective("all_reduce", 5965, 78)).backend == "xla"


@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter", "all_to_all"])
@pytest.mark.parametrize("sizes", [(64, 3072), (512, 4096), (20480, 4096)])
def test_a_collective_of_whole_rows_is_a_kernel(name, sizes):
    assert chosen(collective(name, *sizes)).backend == "pallas"


def test_a_short_collective_needs_more_than_a_few_percent(monkeypatch):
    def table(xla_us, fused_us):
        entries = [
            dataclasses.replace(
                entry(),
                op="all_reduce",
                devices=2,
                sizes=dict(m=m, n=2048),
                fused_us=fused_us,
                xla_us=xla_us,
                config=dict(num_blocks=32),
            )
            for m in (16, 256)
        ]
        found = Table(H200.kind, tuple(entries))
        monkeypatch.setattr(tables, "table_for", lambda kind: found)
        return chosen(collective("all_reduce", 64, 2048)).backend

    assert table(20, 17) == "xla" and table(20, 15) == "pallas"
    assert table(200, 170) == "pallas"  # That takes long enough to be sure of.


def times(m: int, devices: int = 2) -> tuple[float, ...]:
    """Of the kernel and of XLA; () where the table has none."""
    asked = collective("all_gather", m, 2048, devices)
    return transfers.times(asked, "all_gather", m * 2048) or ()


def test_times_of_a_collective_lie_between_those_of_its_table():
    small, middle, large = times(2048), times(4096), times(8192)
    assert small == pytest.approx((39.55, 59.65)) and large == pytest.approx((119.9, 160.94))
    assert all(
        math.isclose(m, math.sqrt(a * b)) for a, m, b in zip(small, middle, large, strict=True)
    )
    assert times(2**17) == pytest.approx([2 * us for us in times(2**16)])
    assert not times(64, devices=16)


def matmul_us(m: int, k: int, n: int) -> float:
    return products.unaligned(m, k, n, 2, 132)


def test_matmuls_of_xla_are_slow_where_rows_are_not_aligned():
    assert matmul_us(6610, 6400, 2440) == 0
    # Measured on H200s, without the collectives: some 900, 430 and 610 (rows of 8 bytes more).
    # 404 x 10904 x 3724 took twice as long for each k of a tile as the last one.
    assert matmul_us(4096, 8192, 4100) == pytest.approx(610, rel=0.4)
    assert matmul_us(404, 10904, 3724) == pytest.approx(200, rel=0.4)
    assert matmul_us(6610, 6398, 2442) == pytest.approx(900, rel=0.15)
    assert matmul_us(1203, 4111, 5242) == pytest.approx(430, rel=0.25)
    # A few tiles are divided along the contraction: 44 with the transfer.
    assert matmul_us(1362, 6891, 39) < 44
    work = Work(product=(6610, 6398, 2442))
    assert costs.estimate(work, H200)[1] > costs.estimate(work, H200)[0]


@pytest.mark.parametrize(
    ("sizes", "us"),
    [
        ((18794, 21, 10833), 171),  # A result larger than the L2.
        ((5296, 19808, 152), 79),  # An lhs of 210 MB.
    ],
)
def test_matmuls_of_xla_take_as_long_as_memory(sizes, us):
    """Measured on 2 H200s, less the collective."""
    assert us / 2 < products.by_xla(*sizes, 2, 132) < 1.7 * us


def misaligned_us(name: str, m: int, n: int) -> float:
    traffic = OPERATIONS[name].work(collective(name, m, n)).traffic
    assert traffic is not None
    return transfers.misaligned_us(traffic)


def test_collectives_of_xla_are_slow_where_parts_begin_at_no_16_bytes():
    # Of 205 us, where a part that is aligned takes 107.
    assert misaligned_us("all_to_all", 5254, 4219) == pytest.approx(98, rel=0.15)
    assert not any(misaligned_us(name, 5248, 4224) for name in COLLECTIVES)
    assert misaligned_us("all_reduce", 5254, 4219) == 0
    assert misaligned_us("all_gather", 5251, 4219) > misaligned_us("reduce_scatter", 5254, 4219)
    assert chosen(collective("all_to_all", 5254, 4219)).backend == "pallas"


@pytest.mark.parametrize(
    ("sizes", "launches"),
    [
        ((527, 141, 454), 1),
        ((8, 648, 16), 1),
        ((4, 9420, 2), 1),
        ((60, 608, 2222), 2),
        ((10, 476, 500), 4),
        ((657, 321, 230), 4),
        ((16, 15184, 112), 4),
        ((8, 664, 2016), 1),
        ((12, 600, 1886), 4),
    ],
)
def test_into_how_many_kernels_xla_divides_a_product(sizes, launches):
    """As programs have it that were compiled for an H100."""
    assert products.launches_of_xla(*sizes, 2, 132) == launches


def test_copies_of_collectives_count_by_launches_or_by_bytes():
    """The kernel took 56 with 24 MB of 342 columns copied, XLA 66; with 100 MB of 7621 236, 207."""
    assert costs.copies_us(1000, 32) == 2 * costs.COPY_LAUNCH_US
    assert costs.copies_us(24_200_000, 684) == pytest.approx(17, rel=0.3)
    assert costs.copies_us(99_800_000, 15242) == pytest.approx(119, rel=0.3)
    assert chosen(collective("reduce_scatter", 23612, 342)).backend == "pallas"
    assert chosen(collective("reduce_scatter", 4366, 7621)).backend == "xla"


def test_groups_of_few_rows_are_multiplied_beside_each_other():
    """XLA took 14 for 8 groups, not 8 times as long as for one."""
    one, eight = (costs.estimate(Work(product=(194, 524, 36), matrices=g), H200) for g in (1, 8))
    assert one[1] == eight[1]
    many = costs.estimate(Work(product=(10088, 1272, 8), matrices=58), H200)
    assert many[1] > 5 * many[0]


@pytest.mark.parametrize(
    ("name", "sizes", "backend"),
    [
        ("matmul_all_reduce", (6610, 2 * 6398, 2442), "pallas"),  # 0.41 of XLA's time.
        ("all_gather_matmul_n", (2406, 4111, 5242), "pallas"),  # 0.3.
        ("matmul_all_reduce", (3509, 13746, 1), "xla"),  # 2.1.
        ("matmul_reduce_scatter", (1362, 13782, 39), "xla"),  # 3.2.
        ("all_gather_matmul", (542, 129, 23838), "xla"),  # 1.5.
        # XLA gathers shards that are no multiples of 16 bytes slowly.
        ("all_gather_matmul", (4078, 1123, 226), "pallas"),  # 0.68.
        ("all_gather_matmul", (706, 7901, 258), "pallas"),  # 0.75.
        ("all_gather_matmul_k", (3018, 6828, 4), "pallas"),  # 0.75.
        # Copies of short operands take launches, which differ between runs.
        ("all_gather_matmul_n", (4, 2, 20), "xla"),  # 1.5.
    ],
)
def test_what_was_measured_at_odd_sizes_is_what_is_chosen(name, sizes, backend):
    asked = problem(*sizes, operation=name, devices=2, kind=H200.kind)
    assert chosen(asked).backend == backend


@pytest.mark.parametrize(
    ("sizes", "columns"), [((3686, 2556, 464, 5), 128), ((1616, 4152, 6192, 3), 256)]
)
def test_groups_have_narrow_tiles_where_these_fit_into_one_wave(sizes, columns):
    """Narrow ones took 0.82 of the large ones' time at the first size, 1.04 at the second."""
    types = Types(lhs="bfloat16", rhs="bfloat16", out="bfloat16")
    asked = Problem(
        operation="grouped_matmul",
        sizes=dict(zip("mkng", sizes, strict=True)),
        types=types,
        devices=1,
        machine=H200,
    )
    assert OPERATIONS["grouped_matmul"].kernels[0].default(asked).tiles.tile_n == columns


def test_copies_beside_a_matmul_count_by_their_number_and_kind():
    """With 11 MB of a result cut out a kernel took 24 us longer, with 216 MB of lhs padded 133."""
    short = OPERATIONS["all_gather_matmul"]
    two, three = (
        costs.copies_launches_us(short.work(problem(64, k, 64 * 2, devices=2)), 2) for k in (66, 64)
    )
    assert (two, three) == (costs.COPIES_BESIDE_US[2], 0.0)
    cut = OPERATIONS["matmul_reduce_scatter"].work(
        problem(3198, 2, 3495, operation="matmul_reduce_scatter", devices=2)
    )
    assert costs.copied_for_sizes_us(cut, 2, 11_300_000) == pytest.approx(24, rel=0.4)
    padded = OPERATIONS["matmul_reduce_scatter"].work(
        problem(19566, 10898, 8, operation="matmul_reduce_scatter", devices=2)
    )
    assert costs.copied_for_sizes_us(padded, 2, 216_000_000) == pytest.approx(133, rel=0.2)


def estimated(name: str, *sizes: int) -> tuple[float, float]:
    """Of the kernel and of XLA."""
    asked = problem(*sizes, operation=name, devices=2, kind=H200.kind)
    return transfers.estimate(OPERATIONS[name], asked)


def test_each_wave_of_tiles_begins_and_stores_them():
    """A short contraction, many tiles: the kernel took 40, XLA 35. It was estimated to take 28."""
    fused_us, _ = estimated("all_gather_matmul_k", 2760, 16, 16384)
    assert fused_us == pytest.approx(40, rel=0.25)
    asked = problem(2760, 16, 16384, operation="all_gather_matmul_k", devices=2, kind=H200.kind)
    assert chosen(asked).backend == "xla"


def test_results_larger_than_the_l2_are_written_at_memorys_rate():
    """326 MB took XLA 120 with its gather; 165 were estimated for the product alone once."""
    assert products.by_xla(6960, 32, 23440, 2, 132) < 1.5 * 93


def test_a_gather_along_rows_or_columns_sends_faster_than_one_along_the_contraction():
    """45 MB for few rows took 197 in one kernel, 294 by XLA."""
    asked = problem(24, 10800, 4000, operation="all_gather_matmul_n", devices=2, kind=H200.kind)
    assert chosen(asked).backend == "pallas"
    along = {axis: estimated(f"all_gather_matmul{axis}", 8192, 8192, 16)[0] for axis in ("", "_k")}
    assert along[""] < 0.95 * along["_k"]


@pytest.mark.parametrize(
    ("name", "sizes", "copies"),
    [
        ("matmul_reduce_scatter", (64, 16, 6), 2),  # rhs and the result; lhs has rows of 16 bytes.
        ("matmul_reduce_scatter", (64, 20, 8), 2),
        ("all_gather_matmul", (64, 10, 16), 2),
        ("all_gather_matmul_k", (64, 24, 16), 2),
        ("all_gather_matmul_n", (64, 10, 20), 2),
        ("all_gather_matmul_n", (12, 68, 40), 3),  # Of 6 rows, the columns of the kernel's result.
        ("all_gather_matmul_n", (16, 72, 40), 0),
        ("matmul_all_reduce", (64, 16, 8), 0),
    ],
)
def test_how_many_operands_and_results_are_copied(name, sizes, copies):
    asked = problem(*sizes, operation=name, devices=2, kind=H200.kind)
    work, is_transposed = OPERATIONS[name].work(asked), name.endswith("_n")
    assert costs.copies(work.transposed if is_transposed else work, 2) == copies


def test_large_sums_are_sent_at_their_own_rates():
    """The all-reduce took 174 in the kernel and 224 by XLA, the reduce-scatter 95 and 130."""
    assert estimated("matmul_all_reduce", 1464, 208, 15456)[0] == pytest.approx(174, rel=0.15)
    assert estimated("matmul_reduce_scatter", 7456, 16, 2744)[0] == pytest.approx(95, rel=0.15)
    asked = problem(1464, 208, 15456, operation="matmul_all_reduce", devices=2, kind=H200.kind)
    assert chosen(asked).backend == "pallas"


def test_an_entry_whose_operand_was_copied_says_nothing_of_others():
    """32 x 16 took 14.6 us by the kernel and 21.1 by XLA. The smallest entry was copied to rows."""
    assert chosen(collective("reduce_scatter", 32, 16)).backend == "pallas"
