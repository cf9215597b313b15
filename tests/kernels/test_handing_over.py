"""Tiles that are handed over under the first products of the next one (`hopper/late.py`)."""

from __future__ import annotations

import dataclasses
import functools
import types
from typing import Any

import fused_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scaled_cases
from blackwell_cases import replacing
from fused_cases import BF16, F32, whole_numbers
from selection import slow

import stretto as st
from stretto.distributed.simulator import SimulationError
from stretto.kernels.engine.hopper import late, matmul
from stretto.kernels.engine.hopper.tile_config import TileConfig
from stretto.kernels.fused import matmul_all_reduce, matmul_reduce_scatter
from stretto.kernels.fused.local_matmul import local_matmul

TILES = TileConfig(tile_n=256, tile_k=128, num_stages=2, store_buffers=4)
SIZES = 304, 640, 320  # 6 tiles, three a block, of 5 steps and 4 pieces.


def product(tiles=TILES, sizes=SIZES, seed=0, out=BF16):
    """Whether the numbers are right, and the report."""
    m, k, n = sizes
    lhs, rhs = whole_numbers(seed, m, k), whole_numbers(seed + 1, n, k)
    scales = scaled_cases.scales("row", m, k, n)
    call = jax.jit(
        functools.partial(local_matmul, config=tiles, out_dtype=out, rhs_transposed=True)
    )
    x, y = (jnp.asarray(a, scaled_cases.E4M3) for a in (lhs, rhs))
    of_x, of_y = (jnp.asarray(scale) for scale in scales)
    with st.simulate(seed=seed, core_count=2, on_finding="record") as report:
        found = np.asarray(call(x, y, lhs_scale=of_x, rhs_scale=of_y), np.float32)
    return np.array_equal(found, cases.rounded(scaled_cases.exact(lhs, rhs, *scales), out)), report


@pytest.fixture
def ways(monkeypatch):
    """Whether tiles are handed over late, once for each kernel that is traced."""
    found, original = [], late.is_possible
    monkeypatch.setattr(late, "is_possible", lambda *a: found.append(original(*a)) or found[-1])
    return found


@pytest.mark.parametrize("buffers", [1, 2, 4])
@pytest.mark.parametrize("k", [128, 256, 1280])  # One step, two, and ten.
def test_whole_numbers_are_exact(buffers, k):
    tiles = dataclasses.replace(TILES, store_buffers=buffers)
    right, report = product(tiles, (304, k, 320), seed=buffers)
    assert right and report.ok, str(report)


@pytest.mark.parametrize(
    ("out", "tiles", "is_late"),
    [
        (BF16, TILES, True),
        (F32, TILES, False),
        (BF16, dataclasses.replace(TILES, tile_n=128, most_parts=2), False),  # shared
    ],
)
@pytest.mark.usefixtures("traces_apart")
def test_results_of_16_bits_are_handed_over_late(ways, out, tiles, is_late):
    sizes = (640, 128 * 20, 128) if tiles.most_parts > 1 else SIZES
    right, report = product(tiles, sizes, out=out)
    assert right and report.ok and set(ways) == {is_late}


@pytest.mark.usefixtures("traces_apart")
def test_operands_of_16_bits_are_not(ways):
    lhs, rhs = (jnp.zeros(shape, BF16) for shape in ((128, 64), (64, 128)))
    with st.simulate(core_count=2):
        local_matmul(lhs, rhs)
    assert set(ways) == {False}


@pytest.mark.parametrize(
    ("name", "devices", "buffers", "is_late"),
    [
        ("matmul_reduce_scatter", 2, 1, True),  # The copy engine adds.
        slow("matmul_reduce_scatter", 3, 2, True),  # One of two addends comes before the last.
        ("matmul_all_reduce", 2, 2, True),
        ("matmul_all_reduce", 2, 1, False),  # No room for the addends of a whole tile.
    ],
)
@pytest.mark.usefixtures("traces_apart")
def test_sums_are_the_same(monkeypatch, ways, name, devices, buffers, is_late):
    configs = {
        "matmul_reduce_scatter": matmul_reduce_scatter.Config,
        "matmul_all_reduce": matmul_all_reduce.Config,
    }
    tiles = TileConfig(tile_n=128, tile_k=128, num_stages=3, store_buffers=buffers)
    run = functools.partial(scaled_cases.run, name, "row", devices, (256, 640, 384))
    results = []
    for may in (True, False):
        if not may:
            monkeypatch.setattr(late, "is_possible", lambda *args: False)
        jax.clear_caches()
        with st.simulate(seed=1, core_count=2) as report:
            found, _ = run(config=configs[name](tiles=tiles), out_dtype=BF16)
        assert report.ok, str(report)
        results.append(found.astype(np.float32))
    np.testing.assert_array_equal(*results)
    assert set(ways) == {is_late}


@pytest.mark.parametrize(("buffers", "name"), [(1, "free"), (4, "free"), (4, "filled")])
def test_a_wait_that_is_left_out_is_found(monkeypatch, traces_apart, buffers, name):
    replacing(monkeypatch, matmul.Matmul)("barrier_wait", name)
    try:
        _, report = product(dataclasses.replace(TILES, store_buffers=buffers))
    except SimulationError as error:  # Too many arrivals, or nothing that can move.
        report = error.report
    assert report is not None and not report.ok


@pytest.mark.parametrize(
    ("buffers", "products", "shares"),
    [
        (4, 32, [[0], [1], [2], [3]]),
        (2, 3, [[0], [1], [2, 3]]),
        (1, 32, [[0], [], [1], [], [2], [], [3]]),
        (1, 1, [[0, 1, 2, 3]]),
    ],
)
def test_pieces_are_handed_over_under_the_first_products(buffers, products, shares):
    pieces: Any = types.SimpleNamespace(num_buffers=buffers, places=range(4))
    assert late._shares(pieces, products) == shares
