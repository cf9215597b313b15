"""Reduce-scatters in 8 bits on two devices: own products are added where the peer's lie."""

from __future__ import annotations

import dataclasses
import functools

import fused_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scaled_cases
from fused_cases import BF16, F16, F32, rounded, whole_numbers
from jax.sharding import PartitionSpec as P
from scaled_cases import E4M3
from selection import slow

import stretto as st
from stretto.distributed.simulator import SimulationError
from stretto.kernels.engine.hopper.tile_config import TileConfig
from stretto.kernels.fused import matmul_all_reduce, matmul_reduce_scatter
from stretto.kernels.fused.matmul_reduce_scatter import Config
from stretto.kernels.fused.reducing import InPlace

SMALL = Config(tiles=TileConfig(tile_n=64, tile_k=128, num_stages=2, store_buffers=1))
WIDE = Config(tiles=TileConfig(tile_n=192, tile_k=128, num_stages=2, store_buffers=3))
PAIRS = Config(tiles=dataclasses.replace(WIDE.tiles, tile_m=256))
SHARED = Config(tiles=dataclasses.replace(SMALL.tiles, most_parts=2))

pytestmark = pytest.mark.usefixtures("traces_apart")


@pytest.fixture
def made(monkeypatch):
    """What was made of `InPlace`, an entry for each kernel that is traced."""
    found, fold = [], InPlace.fold
    monkeypatch.setattr(InPlace, "fold", lambda self, *a: found.append(self) or fold(self, *a))
    return found


def simulated(
    shape, out, config: Config | None = SMALL, *, kind="row", devices=2, seed=0, **options
):
    """The result, and the simulator's report."""
    with st.simulate(seed=seed, core_count=4, on_finding="record") as report:
        found, _ = scaled_cases.run(
            *("matmul_reduce_scatter", kind, devices, shape),
            **(dict(config=config, out_dtype=out) | options),
        )
    return found.astype(np.float32), report


def sum_of_rounded(shape, out, kind):
    """Of two devices' products, each of them rounded, as is their sum."""
    m, k, n = cases.whole("matmul_reduce_scatter", 2, *shape)
    lhs, rhs = whole_numbers(0, m, k), whole_numbers(1, n, k)
    of_lhs, of_rhs = scaled_cases.scales(kind, m, k, n)
    halves = np.split(lhs, 2, axis=1), np.split(rhs, 2, axis=1)
    scales = [x if kind != "block" else np.split(x, 2, axis=1) for x in (of_lhs, of_rhs)]
    products = [
        scaled_cases.exact(
            *(x[i] for x in halves), *(x[i] if kind == "block" else x for x in scales)
        )
        for i in range(2)
    ]
    return rounded(sum(rounded(product, out) for product in products), out)


@pytest.mark.parametrize(
    ("kind", "shape", "out", "config"),
    [
        ("row", (72, 1200, 200), BF16, WIDE),  # Rows and columns that fill no tile.
        ("tensor", (136, 1200, 136), F16, WIDE),
        ("tensor", (128, 2560, 192), F32, SHARED),
        ("row", (72, 200, 64), F32, SMALL),
        ("block", (72, 256, 72), BF16, SMALL),
        ("row", (264, 256, 200), BF16, PAIRS),
        ("row", (128, 2560, 192), F32, SHARED),  # Two tiles of six, by four blocks.
        slow("row", (264, 256, 200), BF16, dataclasses.replace(SMALL, own_last=False)),
    ],
)
def test_each_product_is_rounded_and_their_sum(made, kind, shape, out, config):
    found, report = simulated(shape, out, config, kind=kind)
    assert report.ok, str(report)
    np.testing.assert_array_equal(found, sum_of_rounded(shape, out, kind))
    assert made


@pytest.mark.parametrize(
    ("devices", "lhs_scale", "rhs_scale", "factors"),
    [
        (2, np.ones((1, 1)), np.ones(()), True),
        (2, None, np.ones(()), True),
        (2, np.ones(()), np.ones((72, 1)), False),
        slow(3, np.ones(()), np.ones(()), False),
    ],
)
def test_one_scale_of_each_tensor_is_two_numbers(
    monkeypatch, devices, lhs_scale, rhs_scale, factors
):
    found, times = [], matmul_reduce_scatter.times_factors
    monkeypatch.setattr(
        matmul_reduce_scatter, "times_factors", lambda refs: found.append(refs) or times(refs)
    )
    lhs, rhs = (jnp.ones((72, 128 * devices), E4M3) for _ in range(2))
    columns = P(None, "x")
    given = [x if x is None else 3 * jnp.asarray(x, F32) for x in (lhs_scale, rhs_scale)]
    call = functools.partial(
        st.matmul_reduce_scatter,
        axis_name="x",
        rhs_transposed=True,
        config=SMALL,
        lhs_scale=given[0],
        rhs_scale=given[1],
    )
    mapped = jax.shard_map(
        call,
        mesh=cases.mesh_of(devices),
        in_specs=(columns, columns),
        out_specs=P("x"),
        check_vma=False,
    )
    with st.simulate(core_count=2):
        out = np.asarray(jax.jit(mapped)(lhs, rhs), np.float32)
    np.testing.assert_array_equal(out, 128 * devices * 3.0 ** sum(x is not None for x in given))
    assert bool(found) == factors


@pytest.mark.parametrize("seed", range(4))
def test_the_order_of_steps_does_not_matter(seed):
    shape = 72, 1200, 200
    found, report = simulated(shape, BF16, WIDE, seed=seed)
    assert report.ok, str(report)
    np.testing.assert_array_equal(found, sum_of_rounded(shape, BF16, "row"))


def test_sums_of_more_products_are_added_in_registers(made):
    shape = 72, 200, 72
    found, report = simulated(shape, BF16, devices=3)
    assert report.ok, str(report)
    assert not made
    exact, _ = simulated(shape, F32, devices=3, backend="xla", config=None)
    np.testing.assert_array_equal(found, rounded(exact, BF16))


def test_all_reduces_are_added_in_registers(made):
    config = matmul_all_reduce.Config(tiles=SMALL.tiles)
    with st.simulate(core_count=2):
        scaled_cases.run("matmul_all_reduce", "row", 2, (72, 256, 128), config=config)
    assert not made


def test_a_sum_that_does_not_wait_for_the_peers_product_is_a_race(monkeypatch):
    monkeypatch.setattr(InPlace, "before", lambda self, tile: None)
    try:
        _, report = simulated((72, 200, 136), F32)
    except SimulationError as error:
        report = error.report
    assert report is not None and "race" in report.kinds()
