"""Each barrier that addends pass on Hopper is needed: the simulator finds what fails without it."""

from __future__ import annotations

import dataclasses

import fused_cases as cases
import jax
import numpy as np
import pytest
from blackwell_cases import replacing
from fused_cases import BF16

import stretto as st
from stretto.distributed.simulator import DeadlockError, SimulationError
from stretto.kernels.engine.hopper import matmul, tile_config
from stretto.kernels.fused import matmul_reduce_scatter
from stretto.kernels.problem.machine import Machine
from stretto.kernels.problem.problem import Problem, Types

# Fewer buffers than pieces, so that each is taken several times for a tile.
TILES = dataclasses.replace(tile_config.NARROW, num_stages=2, store_buffers=1)
CONFIG = matmul_reduce_scatter.Config(tiles=TILES)


@pytest.fixture
def barriers(monkeypatch, traces_apart):
    """Leaves out the waits on the barriers of a name, or the arrivals at them."""
    return replacing(monkeypatch, matmul.Matmul)


def add(devices: int, seed: int = 1):
    """Of two devices there is the last addend alone; of three another one between products."""
    sizes = cases.whole("matmul_reduce_scatter", devices, 200, 96, 200)
    lhs, rhs = cases.operands(*sizes, seed=seed)
    call = cases.mapped("matmul_reduce_scatter", cases.mesh_of(devices), config=CONFIG)
    with st.simulate(seed=seed, core_count=2, on_finding="record") as report:
        out = np.asarray(jax.jit(call)(lhs.astype(BF16), rhs.astype(BF16)), np.float32)
    return np.array_equal(out, cases.rounded(lhs @ rhs, BF16)), report


@pytest.mark.parametrize("devices", [2, 3])
def test_without_a_bug_nothing_is_found(devices):
    right, report = add(devices)
    assert right and report.ok, str(report)


@pytest.mark.parametrize(
    ("devices", "name"), [(2, "loaded"), (2, "filled"), (3, "loaded"), (3, "added")]
)
def test_a_wait_that_is_left_out_is_found(barriers, devices, name):
    barriers("barrier_wait", name)
    try:
        _, report = add(devices)
    except SimulationError as error:  # Too many arrivals, or nothing that can move.
        report = error.report
    assert report is not None and not report.ok


@pytest.mark.parametrize(("devices", "name"), [(2, "loaded"), (2, "filled"), (3, "added")])
def test_an_arrival_that_is_left_out_is_a_deadlock(barriers, devices, name):
    """At `loaded` the storing warp arrives itself for a tile that has no addend."""
    barriers("barrier_arrive", name)
    with pytest.raises(DeadlockError, match=f"waits for barrier {name}"):
        add(devices)


@pytest.mark.parametrize(
    ("sizes", "out", "columns"),
    [
        ((8192, 8192, 8192), "bfloat16", 192),  # 21 waves, in place of 16 of 256 columns
        ((5120, 13824, 5120), "bfloat16", 256),  # 6 and the steps of 8 tiles, by all blocks
        ((2048, 28672, 8192), "bfloat16", 256),  # 4, in place of 6 of 192
        ((2048, 28672, 8192), "float32", 192),
        ((1000, 8192, 2048), "bfloat16", 128),  # 128 tiles, of which a block has one
        ((1100, 8192, 2048), "bfloat16", 192),  # 160, and 110 of 192 columns
    ],
)
def test_sums_have_the_tiles_that_fill_the_device(sizes, out, columns):
    types = Types(lhs="bfloat16", rhs="bfloat16", out=out)
    asked = Problem(
        operation="matmul_reduce_scatter",
        sizes=dict(zip("mkn", sizes, strict=True)),
        types=types,
        devices=2,
        machine=Machine.of_kind("gpu", "NVIDIA H200"),
    )
    assert matmul_reduce_scatter.default_config(asked).tiles.tile_n == columns
