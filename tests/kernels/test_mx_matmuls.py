"""The matmuls with scales that Blackwell's tensor cores apply; nobody has run them on a GPU."""

from __future__ import annotations

import dataclasses

import fused_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scaled_cases
from jax.sharding import PartitionSpec as P
from scaled_cases import E4M3, E5M2, E8M0, F32, NAMES
from selection import slow

import stretto as st
from stretto.distributed.errors import BackendUnavailableError
from stretto.kernels.engine import scales as engine_scales
from stretto.kernels.engine.blackwell.tile_config import TileConfig
from stretto.kernels.fused import (
    all_gather_matmul,
    grouped_matmul,
    matmul_all_reduce,
    matmul_reduce_scatter,
    scaled_groups,
)
from stretto.kernels.operations import scaled_gather

CONFIGS = {
    "all_gather_matmul": all_gather_matmul.Config(chunk_columns=256),
    "matmul_reduce_scatter": matmul_reduce_scatter.Config(),
    "matmul_all_reduce": matmul_all_reduce.Config(),
}
TILES = {
    blocks: TileConfig(
        blocks=blocks, tile_m=128 * blocks, tile_n=128, tile_k=128, num_stages=2, store_buffers=1
    )
    for blocks in (1, 2)
}


def simulated(name, devices, shape, blocks, *, seed=0, **options):
    options = {"config": dataclasses.replace(CONFIGS[name], tiles=TILES[blocks])} | options
    with st.simulate(seed=seed, core_count=2, on_finding="record", target="b200") as report:
        given = dict(dtypes=(E4M3, E5M2), **options)
        out, want = scaled_cases.run(name, "mx", devices, shape, **given)
    return np.array_equal(out, want), report


@pytest.mark.parametrize("name", NAMES)
def test_by_xla(name):
    """Also of a contraction that ends within the elements of a scale."""
    out, want = scaled_cases.run(name, "mx", 2, (40, 160, 128), backend="xla")
    np.testing.assert_array_equal(out, want)


# Per device, m_shard x k x n_shard: rows and columns that fill no tile, and a k that is no multiple
# of 128.
CASES = [
    ("all_gather_matmul", 3, (72, 288, 72), 2),
    ("matmul_reduce_scatter", 2, (72, 256, 136), 1),
    slow("all_gather_matmul", 2, (136, 256, 72), 1),
    slow("matmul_reduce_scatter", 3, (40, 288, 136), 2),
    slow("matmul_all_reduce", 2, (72, 256, 72), 2),
]


@pytest.mark.parametrize(("name", "devices", "shape", "blocks"), CASES)
def test_in_the_simulator(name, devices, shape, blocks):
    right, report = simulated(name, devices, shape, blocks)
    assert right and report.ok and not report.warnings, str(report)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("devices", range(2, 9))
@pytest.mark.timeout(600)
def test_in_many_orders(name, devices):
    """Twenty seeds, one after the other for each number of devices and so for all of them."""
    for seed in range(devices - 2, 20, 7):
        right, report = simulated(name, devices, (136, 160, 136), 1 + seed % 2, seed=seed)
        assert right and report.ok, f"seed {seed}: {report}"


@pytest.mark.slow
def test_weights_that_are_gathered():
    """Rows of transposed rhs, and their scales with them, as rows of the transposed problem."""
    lhs, rhs = cases.whole_numbers(0, 72, 256), cases.whole_numbers(1, 272, 256)
    of_lhs, of_rhs = scaled_cases.scales("mx", 72, 256, 272)

    def call(x, y, s, t):
        given = dict(lhs_scale=s, rhs_scale=t, rhs_transposed=True, out_dtype=F32)
        return st.all_gather_matmul(x, y, "x", gather_axis="n", **given)

    rows = P("x", None)
    program = jax.shard_map(
        call,
        mesh=cases.mesh_of(2),
        in_specs=(P(), rows, P(), rows),
        out_specs=P(),
        check_vma=False,
    )
    values = jnp.asarray(lhs, E4M3), jnp.asarray(rhs, E4M3)
    with st.simulate(core_count=2, target="b200") as report:
        out = jax.jit(program)(*values, jnp.asarray(of_lhs, E8M0), jnp.asarray(of_rhs, E8M0))
        np.testing.assert_array_equal(out, scaled_cases.exact(lhs, rhs, of_lhs, of_rhs))
    assert report.launches == 1


@pytest.mark.parametrize("blocks", [slow(1), 2])
def test_groups(blocks):
    """A group may begin at any row; rows of no group have NaN."""
    np.testing.assert_array_equal(*scaled_cases.groups("mx", "xla"))
    config = grouped_matmul.Config(tiles=TILES[blocks])
    with st.simulate(core_count=2, target="b200") as report:
        out, want = scaled_cases.groups("mx", "simulator", config=config)
    assert report.ok and report.launches == 1
    np.testing.assert_array_equal(out, want)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_groups_in_many_orders(seed):
    config = grouped_matmul.Config(tiles=TILES[1 + seed % 2])
    with st.simulate(core_count=2, target="b200", seed=seed) as report:
        out, want = scaled_cases.groups("mx", "simulator", config=config)
    assert report.ok
    np.testing.assert_array_equal(out, want)


# --- Steps that are needed ------------------------------------------------------------------------


@pytest.mark.usefixtures("traces_apart")
def test_every_tile_of_a_group_has_scales_of_its_own_rows(monkeypatch):
    """Numbers are wrong where tiles take the scales of 128 rows after 128 others."""
    monkeypatch.setattr(
        scaled_groups, "rows_of_tiles", lambda sizes, m, tile_m, most: jnp.arange(most * tile_m)
    )
    config = grouped_matmul.Config(tiles=TILES[1])
    with st.simulate(core_count=2, target="b200", on_finding="record"):
        out, want = scaled_cases.groups("mx", "simulator", config=config)
    assert not np.array_equal(out, want)


@pytest.mark.usefixtures("traces_apart")
@pytest.mark.parametrize("mistake", ["its own scales", "those of the next shard"])
def test_every_shard_has_scales_of_its_own(monkeypatch, mistake):
    """Numbers are wrong where a device takes its own for all shards, or other ones."""
    if mistake == "its own scales":
        monkeypatch.setattr(
            scaled_gather, "_everywhere", lambda scale, axes: jnp.concatenate([scale] * 2)
        )
    else:
        arranged = engine_scales.arranged
        monkeypatch.setattr(
            engine_scales,
            "arranged",
            lambda scale, rows: arranged(jnp.roll(scale, scale.ndim - 2, 0), rows),
        )
    right, report = simulated("all_gather_matmul", 2, (72, 128, 72), 1)
    assert report.ok and not right


# --- What may be asked for ------------------------------------------------------------------------


def explained(name, lhs_scale, rhs_scale, *, target="b200", rhs=(256, 256), **options):
    """What `explain` says of lhs of 256 x 256 on two devices."""
    found = []

    def call(x, y, s, t):
        given = dict(lhs_scale=s, rhs_scale=t, rhs_transposed=True) | options
        found.append(st.explain(getattr(st, name), x, y, "x", **given))
        return x

    program = jax.shard_map(
        call, mesh=cases.mesh_of(2), in_specs=P(), out_specs=P(), check_vma=False
    )
    values = [jax.ShapeDtypeStruct(shape, E4M3) for shape in ((256, 256), rhs)]
    with st.simulate(target=target):
        jax.eval_shape(program, *values, lhs_scale, rhs_scale)
    return found[0]


def of_32(k=256):
    return jax.ShapeDtypeStruct((256, k // 32), E8M0)


def test_the_tiles_that_serve():
    choice = explained("matmul_all_reduce", of_32(), of_32())
    assert choice.problem.operation == "matmul_all_reduce_fp8_mx"
    assert choice.backend == "simulator" and choice.config.tiles.tile_n == 128


@pytest.mark.parametrize(
    ("options", "k", "message"),
    [
        (dict(target="h100"), 256, "by the tensor cores of Blackwell GPUs only"),
        (dict(gather_axis="k", rhs=(256, 512)), 512, "scales of each device's own, which no kern"),
    ],
)
def test_what_xla_serves(options, k, message):
    choice = explained("all_gather_matmul", of_32(), of_32(k), **options)
    assert choice.backend == "xla" and message in choice.reason
    with pytest.raises(BackendUnavailableError, match=message):
        explained("all_gather_matmul", of_32(), of_32(k), backend="simulator", **options)


@pytest.mark.parametrize(
    ("shape", "dtype", "options", "message"),
    [
        ((256, 8), E8M0, dict(rhs_transposed=False), r"lie along k of rhs \[n, k\]; pass it so"),
        ((256, 2), F32, {}, r"lhs_scale is float32 of shape \(256, 2\); with another scale in fl"),
        ((256, 2), E8M0, {}, r"of shape \(256, 8\), one for each 32 elements along k"),
    ],
)
def test_scales_that_do_not_fit(shape, dtype, options, message):
    with pytest.raises(ValueError, match=message):
        scale = jax.ShapeDtypeStruct(shape, dtype)
        explained("matmul_reduce_scatter", scale, of_32(), **options)
