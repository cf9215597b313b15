"""Which tiles serve at which sizes: what fills the multiprocessors, as it was measured."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as some

from stretto.kernels.choice import by_table, config_data, tables
from stretto.kernels.choice.tables import Entry, Table
from stretto.kernels.engine.hopper.tile_config import (
    LARGE,
    LARGE_FP8,
    LARGE_PAIR,
    NARROW,
    NARROWEST,
    PAIR,
    SHARED,
    SHARED_FP8,
    SHARED_WIDE,
    WIDE_RESULT,
    WIDE_RESULT_FP8,
)
from stretto.kernels.engine.waves import SENT_IN_A_US, Result
from stretto.kernels.fused import (
    all_gather_matmul,
    gather_times,
    matmul_all_reduce,
    matmul_reduce_scatter,
)
from stretto.kernels.operations import OPERATIONS
from stretto.kernels.operations import SCALED as EIGHT_BITS
from stretto.kernels.problem.machine import Machine
from stretto.kernels.problem.problem import Problem, Types

H200 = Machine.of_kind("gpu", "NVIDIA H200")
TILES = {tile.tile_n: tile for tile in (LARGE, WIDE_RESULT, NARROW)}


def result(shards: int, rows: int, columns: int) -> Result:
    return Result(shards=shards, rows=rows, columns=columns, multiprocessors=132)


def problem(operation: str, *sizes: int, devices: int = 2) -> Problem:
    return Problem(
        operation=operation,
        sizes=dict(zip("mkn", sizes, strict=True)),
        types=Types(lhs="bfloat16", rhs="bfloat16", out="bfloat16"),
        devices=devices,
        machine=H200,
    )


def eight_bits(operation: str, *sizes: int) -> Problem:
    types = Types(lhs="float8_e4m3fn", rhs="float8_e4m3fn", out="bfloat16", scales="row")
    return dataclasses.replace(problem(operation, *sizes), types=types)


@pytest.mark.parametrize(
    ("made", "waves"),
    [
        (result(1, 128, 256), {256: 1, 192: 1, 128: 1}),
        (result(2, 2560, 5120), {256: 7, 192: 9, 128: 13}),
        (result(2, 2560, 6912), {256: 9, 192: 11, 128: 17}),
        (result(2, 500, 4104), {256: 2, 192: 2, 128: 2}),
    ],
)
def test_waves(made, waves):
    assert {columns: made.waves(tile) for columns, tile in TILES.items()} == waves


@given(some.integers(1, 4), some.integers(1, 9000), some.integers(1, 9000))
def test_waves_hold_the_result(shards, rows, columns):
    made = result(shards, rows, columns)
    for tile in TILES.values():
        held = made.waves(tile) * made.multiprocessors * tile.tile_m * tile.tile_n
        assert held >= shards * rows * columns


@pytest.mark.parametrize(
    ("made", "measured"),
    [  # Own matmuls on two H200s (docs/measure/decisions.md), in microseconds.
        (result(1, 5120, 5120), {256: 646, 192: 617, 128: 606}),
        (result(1, 5120, 6912), {256: 631, 192: 571}),
        (result(1, 8192, 8192), {256: 914, 192: 899}),
        (result(1, 2048, 14336), {256: 747, 192: 801}),
        (result(1, 2048, 8192), {256: 742, 192: 822}),
        (result(2, 1536, 6144), {256: 592, 192: 528, 128: 531}),  # A reduce-scatter.
        (result(2, 1536, 5120), {256: 464, 192: 437}),  # A gather, by ratios to XLA's matmul.
    ],
)
def test_the_order_of_the_times_is_the_measured_one(made, measured):
    for one, other in itertools.combinations(measured, 2):
        expected = measured[one] / measured[other]
        found = made.time(TILES[one]) / made.time(TILES[other])
        assert (found > 1) == (expected > 1)
        assert found == pytest.approx(expected, abs=0.03)


def test_a_shared_last_wave_takes_as_long_as_measured():
    made = result(1, 5120, 5120)
    of_k = dataclasses.replace(made, k=6912)
    assert made.time(SHARED) == of_k.time(LARGE) == made.time(LARGE)  # Without k nothing is shared.
    measured = {SHARED: 583, LARGE: 659, NARROW: 615}  # On two H200s, in one run.
    for one, other in itertools.combinations(measured, 2):
        expected = measured[one] / measured[other]
        assert of_k.time(one) / of_k.time(other) == pytest.approx(expected, abs=0.02)
    odd = dataclasses.replace(of_k, rhs_within=1.0)
    assert not odd.shares(SHARED) and odd.time(SHARED) == odd.time(LARGE)


@pytest.mark.parametrize(
    ("sizes", "shares"),
    [
        ((5120, 13824, 5120), True),
        ((8192, 8192, 8192), False),  # 15.5 waves: as measured, nothing is gained.
        ((2048, 28672, 8192), False),
        ((5120, 13824, 5128), False),  # Rows that begin within a line.
    ],
)
def test_where_a_reduce_scatter_shares_its_last_wave(sizes, shares):
    of_these = problem("matmul_reduce_scatter", *sizes)
    found = OPERATIONS["matmul_reduce_scatter"].kernels[0].default(of_these)
    assert (found.tiles == SHARED) == shares
    tried = {config.tiles for config in matmul_reduce_scatter.Config.candidates(of_these)}
    assert (SHARED in tried) == shares


@pytest.mark.parametrize(
    ("sizes", "shared", "wide"),
    [  # Over tiles of 256 columns that are not shared, on one H200.
        ((5120, 6912, 5120), 0.905, 0.965),
        ((5120, 14336, 5120), 0.912, 0.971),
        ((5120, 27648, 5120), 0.900, 0.972),
        ((4096, 8192, 4352), 0.901, 0.923),
        ((4608, 6912, 4864), 0.932, 0.999),
        ((3584, 6912, 6144), 0.899, 0.873),
        ((6144, 3584, 5120), 0.990, 0.950),
    ],
)
def test_products_in_8_bits_take_as_long_as_measured(sizes, shared, wide):
    m, k, n = sizes
    made = dataclasses.replace(result(1, m, n), k=k)
    of_large = made.time(LARGE_FP8)
    assert made.time(SHARED_FP8) / of_large == pytest.approx(shared, abs=0.04)
    assert made.time(WIDE_RESULT_FP8) / of_large == pytest.approx(wide, abs=0.04)


@pytest.mark.parametrize(
    ("operation", "sizes", "tiles"),
    [
        ("matmul_reduce_scatter_fp8", (5120, 13824, 5120), SHARED_FP8),  # 8 tiles left over
        ("matmul_reduce_scatter_fp8", (5120, 55296, 5120), SHARED_FP8),  # by 8, so long is k
        ("matmul_reduce_scatter_fp8", (4608, 13824, 4864), SHARED_FP8),  # 24 left over
        ("matmul_reduce_scatter_fp8", (3584, 13824, 6144), WIDE_RESULT_FP8),  # 7 waves of 192
        ("matmul_reduce_scatter_fp8", (8192, 8192, 8192), WIDE_RESULT_FP8),  # 68 left over
        ("matmul_reduce_scatter_fp8", (6144, 8192, 5632), LARGE_FP8),  # none
        ("matmul_all_reduce_fp8", (5120, 13824, 5120), WIDE_RESULT_FP8),  # was not timed
        ("all_gather_matmul_fp8", (5120, 6912, 10240), SHARED_FP8),
        ("all_gather_matmul_fp8", (3584, 6912, 12288), WIDE_RESULT_FP8),
        ("all_gather_matmul_fp8", (8192, 8192, 8192), LARGE_FP8),
        ("all_gather_matmul_fp8", (6144, 8192, 11264), LARGE_FP8),
    ],
)
def test_where_products_in_8_bits_share_their_last_wave(operation, sizes, tiles):
    asked, kernel = eight_bits(operation, *sizes), EIGHT_BITS[operation].kernels[0]
    assert kernel.default(asked).tiles == tiles
    tried = {config.tiles for config in kernel.candidates(asked)}
    assert tiles in tried and (SHARED_FP8 in tried) >= (tiles == SHARED_FP8)
    kernel.default(asked).check(asked)


def test_in_lines_the_time_of_an_element_hardly_depends_on_the_tile():
    assert {n: result(1, 128, 256).time(tile) for n, tile in TILES.items()} == pytest.approx(
        {256: 32768, 192: 24576 * 0.99, 128: 16384 * 1.01}
    )


@pytest.mark.parametrize(
    ("sizes", "within", "even", "measured"),
    [  # Of products alone on one H200, over those of even sizes in the tiles that are named first.
        ((1000, 4104), (0, 1), (1024, 4096, NARROW), {NARROW: 1.44, PAIR: 1.15}),
        (
            (1000, 8200),
            (0, 1),
            (1024, 8192, LARGE),
            {NARROW: 1.44, LARGE: 1.23, PAIR: 1.14, LARGE_PAIR: 1.05},
        ),
        ((8184, 4088), (1, 1), (8192, 4096, LARGE), {LARGE: 1.38, LARGE_PAIR: 1.08}),
        ((1024, 4096), (1, 0), (1024, 4096, NARROW), {NARROW: 1.24, LARGE: 1.02}),
        ((5120, 5120), (1, 0), (5120, 5120, LARGE), {LARGE: 1.03}),
    ],
)
def test_where_rows_begin_within_a_line_tiles_cost_what_they_load(sizes, within, even, measured):
    *even_sizes, tile = even
    base = result(1, *even_sizes).time(tile)
    lhs, rhs = within
    odd = dataclasses.replace(result(1, *sizes), lhs_within=lhs, rhs_within=rhs)
    for tile, ratio in measured.items():
        assert odd.time(tile) / base == pytest.approx(ratio, abs=0.07), tile


def test_few_tiles_are_not_limited_by_loads():
    """With 50 tiles for 132 multiprocessors pairs took 1.2 of the time of tiles of 128 columns."""
    odd = dict(lhs_within=1.0, rhs_within=1.0)
    one = dataclasses.replace(result(1, 128, 128), **odd)
    wave = dataclasses.replace(result(1, 128 * one.multiprocessors, 128), **odd)
    assert one.time(NARROW) < 0.7 * wave.time(NARROW)
    more = dataclasses.replace(result(1, 128 * (one.multiprocessors + 1), 128), **odd)
    assert more.time(NARROW) == pytest.approx(wave.time(NARROW) + one.time(NARROW))
    found = all_gather_matmul.default_config(problem("all_gather_matmul", 2416, 88, 496))
    assert found.tiles == NARROW


@pytest.mark.parametrize(
    ("operation", "sizes", "columns"),
    [
        ("all_gather_matmul", (1000, 3072, 8208), 128),
        ("matmul_all_reduce", (6610, 12796, 2442), 256),
        ("matmul_reduce_scatter", (8184, 8208, 8200), 256),
        ("matmul_reduce_scatter", (5120, 13840, 5120), 192),  # 1.022 and 1.025 of the even size.
        # 3 steps: pairs of 256 x 256 took 1.25 of the time of 192 columns. One: 1.08.
        ("matmul_reduce_scatter", (15856, 368, 520), 192),
        ("matmul_reduce_scatter", (7456, 16, 2744), 256),
    ],
)
def test_tiles_of_odd_sizes(operation, sizes, columns):
    found = OPERATIONS[operation].kernels[0].default(problem(operation, *sizes))
    assert found.tiles.tile_n == columns


def test_where_sending_takes_longest_all_tiles_of_the_last_shard_are_in_flight():
    """At 8384 x 6480 x 816 pairs, which leave 4 tiles, took 268, and 192 columns 247."""
    asked = problem("all_gather_matmul", 8384, 6480, 816)
    times = {tile: gather_times.us(asked, tile) for tile in (PAIR, WIDE_RESULT)}
    assert times[PAIR] / times[WIDE_RESULT] == pytest.approx(1.085, abs=0.1)
    assert all_gather_matmul.default_config(asked).tiles in (NARROW, WIDE_RESULT)


@pytest.mark.parametrize(
    ("sizes", "columns", "chunk"),
    [
        ((5120, 5120, 13824), 192, 1280),  # 11 waves, in place of 9 of 256 columns
        ((2048, 8192, 28672), 256, 2048),
        ((1024, 3072, 8192), 128, 768),  # 2 waves: the first one hides the transfer
    ],
)
def test_a_gather_has_the_tiles_that_end_soonest(sizes, columns, chunk):
    found = all_gather_matmul.default_config(problem("all_gather_matmul", *sizes))
    assert (found.tiles.tile_n, found.chunk_columns) == (columns, chunk)


@pytest.mark.parametrize(("columns", "narrowest"), [(8, True), (64, True), (65, False)])
def test_a_gather_of_few_columns_has_the_narrowest_tiles(columns, narrowest):
    asked = problem("all_gather_matmul", 512, 4096, 2 * columns)
    assert (all_gather_matmul.default_config(asked).tiles == NARROWEST) == narrowest
    tried = [config.tiles for config in all_gather_matmul.Config.candidates(asked)]
    assert (NARROWEST in tried) == narrowest


@pytest.mark.parametrize("sizes", [(4096, 2048, 96), (64, 2048, 4096), (16, 176, 3840)])
@pytest.mark.parametrize("operation", ["all_gather_matmul_k", "all_gather_matmul_n"])
def test_the_tuner_tries_the_tiles_of_the_default(operation, sizes):
    asked, kernel = problem(operation, *sizes), OPERATIONS[operation].kernels[0]
    assert kernel.default(asked).tiles in [config.tiles for config in kernel.candidates(asked)]


@pytest.mark.parametrize(("k", "chunk"), [(64, 256), (1024, 256), (1040, 512), (5120, 1280)])
def test_a_tile_waits_four_times_at_most(k, chunk):
    found = gather_times.chunk_columns(problem("all_gather_matmul", 1024, k, 1024))
    assert found == chunk and -(-k // found) <= gather_times.GATES


def test_between_entries_a_tile_waits_no_more_often(monkeypatch):
    near(monkeypatch, "all_gather_matmul", all_gather_matmul.Config(tiles=WIDE_RESULT))
    assert looked_up("all_gather_matmul", 5120, 5120, 13824).chunk_columns == 1024
    assert looked_up("all_gather_matmul", 5120, 8192, 13824).chunk_columns == 2048


@pytest.mark.parametrize(
    ("sizes", "columns", "last"),
    [
        ((4608, 13824, 4864), 128, True),
        ((5120, 13824, 5120), 192, True),  # Shared, below.
        ((5120, 2048, 5120), 128, False),  # The sums would take longer than the own tiles.
        ((8192, 8192, 8192), 192, False),
        ((512, 8192, 1024), 128, False),  # One wave.
    ],
)
def test_own_tiles_of_an_all_reduce_are_last_where_they_are_narrow(sizes, columns, last):
    found = matmul_all_reduce.default_config(problem("matmul_all_reduce", *sizes))
    assert (found.tiles.tile_n, found.own_last) == (columns, last)


@pytest.mark.parametrize(
    ("sizes", "devices", "tiles"),
    [
        ((5120, 13824, 5120), 2, SHARED_WIDE),
        ((2048, 28672, 8192), 2, SHARED_WIDE),  # They hide the sums of the wave before.
        ((8192, 8192, 8192), 2, WIDE_RESULT),  # Too many tiles are left over.
        ((5120, 13824, 5120), 4, NARROW),  # The sums take longer than the own tiles.
    ],
)
def test_where_an_all_reduce_shares_its_last_wave(sizes, devices, tiles):
    of_these = problem("matmul_all_reduce", *sizes, devices=devices)
    assert matmul_all_reduce.default_config(of_these).tiles == tiles
    tried = {config.tiles for config in matmul_all_reduce.Config.candidates(of_these)}
    assert tiles in tried
    wide = dataclasses.replace(of_these, types=Types(lhs="bfloat16", rhs="bfloat16", out="float32"))
    assert matmul_all_reduce.default_config(wide).tiles == WIDE_RESULT


def test_sums_of_the_last_waves_are_sent_after_the_products():
    made = dataclasses.replace(result(2, 2560, 5120), k=6912, full_waves=False)
    wave = 128 * 192 * 132 / SENT_IN_A_US
    # 8 waves, 24 tiles that blocks share, and what is sent of an element.
    products = made.us(SHARED_WIDE, 6912) - made.us(WIDE_RESULT, 6912) * 8 / 9
    for sent in (1, 2, 4):
        expected = sent * wave * 24 / 132 + max(0.0, sent * wave - products)
        assert made.us_after(SHARED_WIDE, 6912, sent) == pytest.approx(expected)
    assert made.us_after(WIDE_RESULT, 6912, 2) == pytest.approx(2 * wave * 24 / 132)


def near(monkeypatch, operation: str, config, dtype: str = "bfloat16") -> None:
    """A table with one entry, which was measured at 5120 x 5120 x 13824 or its transposed."""
    gathers = operation.startswith("all_gather_matmul")
    sizes = (5120, 5120, 13824) if gathers else (5120, 13824, 5120)
    entry = Entry(
        op=operation,
        sizes=dict(zip("mkn", sizes, strict=True)),
        dtype=dtype,
        devices=2,
        fused_us=500.0,
        xla_us=700.0,
        config=config_data.to_data(config),
    )
    monkeypatch.setattr(tables, "table_for", lambda kind: Table(kind, (entry,)))


def looked_up(operation: str, *sizes: int):
    found = by_table.look_up(OPERATIONS[operation].kernels[0], problem(operation, *sizes))
    assert found is not None
    return found.config


@pytest.mark.parametrize(
    ("sizes", "columns"),
    [
        ((5120, 5120, 13824), 128),  # As it was measured.
        ((5120, 5120, 13312), 128),  # 17 waves as well, where 192 columns take 11.
        ((3072, 5120, 10240), 192),  # 8 waves, where 192 columns take 5.
    ],
)
def test_a_gather_between_entries_has_other_tiles_where_they_are_faster(
    monkeypatch, sizes, columns
):
    config = all_gather_matmul.Config(tiles=NARROW)
    near(monkeypatch, "all_gather_matmul", config)
    assert looked_up("all_gather_matmul", *sizes).tiles.tile_n == columns


@pytest.mark.parametrize(
    ("sizes", "columns"),
    [
        ((5120, 13824, 5120), 128),  # As it was measured.
        ((4608, 12288, 5120), 128),  # 11 waves, where 256 columns take 6 and 192 take 8.
        ((4096, 16384, 4096), 128),  # 8, which take as long as 4 of 256 columns.
        ((3584, 13824, 6144), 192),  # 11, where 192 columns take 7.
    ],
)
def test_a_sum_between_entries_has_other_tiles_where_they_are_faster(monkeypatch, sizes, columns):
    config = matmul_reduce_scatter.Config(tiles=NARROW, pull_slots=3, own_last=False)
    near(monkeypatch, "matmul_reduce_scatter", config)
    found = looked_up("matmul_reduce_scatter", *sizes)
    assert found.tiles.tile_n == columns
    found.check(problem("matmul_reduce_scatter", *sizes))


@pytest.mark.parametrize(
    ("operation", "sizes"),
    [
        ("all_gather_matmul", (4608, 5120, 12288)),
        ("matmul_reduce_scatter", (4608, 12288, 5120)),
        ("matmul_all_reduce", (4608, 12288, 5120)),
    ],
)
def test_what_was_fastest_in_two_parts_stays_so(monkeypatch, operation, sizes):
    kernel = OPERATIONS[operation].kernels[0]
    near(monkeypatch, operation, dataclasses.replace(kernel.Config(), unfused=True))
    assert looked_up(operation, *sizes).unfused


@pytest.mark.parametrize(
    ("sizes", "tiles"),
    [
        ((1000, 3072, 8208), PAIR),  # 56.9 us; NARROW 61.4.
        ((1024, 3072, 8192), NARROW),  # 49.9; PAIR 52.5.
        ((1000, 3072, 16400), LARGE_PAIR),  # 92.3; PAIR 95.5, LARGE 99.9.
        ((1000, 3080, 8192), NARROW),  # Rows of lhs alone begin within a line, of the own shard.
        ((8184, 8200, 8176), LARGE_PAIR),
    ],
)
def test_pairs_of_blocks_load_rows_of_rhs_that_begin_within_a_line(sizes, tiles):
    """On two H200s."""
    asked = problem("all_gather_matmul", *sizes)
    assert all_gather_matmul.default_config(asked).tiles == tiles
    offered = {config.tiles for config in all_gather_matmul.Config.candidates(asked)}
    assert (PAIR in offered) == (sizes[2] // 2 % 64 > 0)


@pytest.mark.parametrize(
    ("operation", "sizes", "tiles"),
    [
        ("matmul_reduce_scatter", (5120, 13840, 5128), LARGE_PAIR),
        ("matmul_all_reduce", (8184, 8208, 8200), LARGE_PAIR),
        ("all_gather_matmul_k", (8184, 8208, 8176), LARGE_PAIR),
        ("all_gather_matmul_k", (8184, 8208, 8192), LARGE),
    ],
)
def test_pairs_of_blocks_in_other_matmuls(operation, sizes, tiles):
    kernel, asked = OPERATIONS[operation].kernels[0], problem(operation, *sizes)
    found = kernel.default(asked)
    assert found.tiles == tiles
    found.check(asked)


@pytest.mark.parametrize(
    ("operation", "sizes", "tiles"),
    [
        ("matmul_reduce_scatter_fp8", (5120, 13824, 5120), LARGE_FP8),  # As it was measured.
        ("matmul_reduce_scatter_fp8", (5120, 14336, 5120), SHARED_FP8),
        ("matmul_reduce_scatter_fp8", (5120, 13824, 5632), LARGE_FP8),  # 88 tiles left over
        ("all_gather_matmul_fp8", (5120, 5120, 14080), SHARED_FP8),
        ("all_gather_matmul_fp8", (5120, 5120, 14592), LARGE_FP8),  # 104 left over
    ],
)
def test_between_entries_products_in_8_bits_share_where_that_is_faster(
    monkeypatch, operation, sizes, tiles
):
    kernel = EIGHT_BITS[operation].kernels[0]
    config = dataclasses.replace(kernel.Config(), tiles=LARGE_FP8)
    near(monkeypatch, operation, config, dtype="float8_e4m3fn")
    found = by_table.look_up(kernel, eight_bits(operation, *sizes))
    assert found is not None
    # Gathers keep what was fastest but for the tiles.
    others = config if operation == "all_gather_matmul_fp8" or tiles == LARGE_FP8 else found.config
    assert found.config == dataclasses.replace(others, tiles=tiles)
