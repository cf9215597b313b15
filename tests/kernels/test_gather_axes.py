"""All-gather matmuls that gather along another dimension than the rows of lhs, in the simulator."""

from __future__ import annotations

import functools

import fused_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fused_cases import BF16, F16, F32
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from selection import slow

import stretto as st
from stretto.kernels.engine.hopper.tile_config import TileConfig
from stretto.kernels.fused import all_gather_matmul_k

everywhere = pytest.mark.parametrize("name", cases.GATHERS)
mostly = pytest.mark.parametrize(
    "name", [name if name == "all_gather_matmul_n" else slow(name) for name in cases.GATHERS]
)


@pytest.fixture(autouse=True)
def simulation():
    with st.simulate(seed=5, core_count=2) as report:
        yield report
    assert report.ok, str(report)


def sides(name: str, *, transposed: bool = False, axis: str = "x") -> tuple[P, P, P]:
    """How lhs, rhs as it is given and the result lie on the devices."""
    (lhs, rhs), out = cases.specs(name, axis)
    return lhs, P(*rhs[::-1]) if transposed else rhs, out


def mapped(name, call, devices=2, *, transposed=False, out_specs=None, check_vma=False):
    lhs, rhs, out = sides(name, transposed=transposed)
    return jax.jit(
        jax.shard_map(
            call,
            mesh=cases.mesh_of(devices),
            in_specs=(lhs, rhs),
            out_specs=out if out_specs is None else out_specs,
            check_vma=check_vma,
        )
    )


def pure_lax(name: str, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    lhs, rhs = lhs.astype(F32), rhs.astype(F32)
    if name == "all_gather_matmul_n":
        return lhs @ lax.all_gather(rhs, "x", axis=1, tiled=True)
    return lax.all_gather(lhs, "x", axis=1, tiled=True) @ rhs


def assert_same(got, want, tolerance=1e-2):
    """Within a few roundings to bfloat16, relative to the largest."""
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert g.shape == w.shape
        w = np.asarray(w, np.float32)
        np.testing.assert_allclose(np.asarray(g, np.float32), w, atol=tolerance * np.abs(w).max())


def check(name, devices, shape, *, dtype=BF16, out_dtype=None, seed=0, **options):
    lhs, rhs = cases.operands(*cases.whole(name, devices, *shape), seed=seed)
    out = cases.run(name, lhs, rhs, devices=devices, dtype=dtype, out_dtype=out_dtype, **options)
    np.testing.assert_array_equal(out, cases.rounded(lhs @ rhs, out_dtype or dtype))


@everywhere
@pytest.mark.parametrize(
    ("devices", "shape"),
    [
        slow(2, (65, 72, 136)),
        (3, (9, 136, 72)),
        slow(4, (1, 8, 8)),
        (2, (264, 320, 328)),
        pytest.param(5, (40, 8, 200), marks=pytest.mark.slow),
    ],
)
def test_any_shape_and_team(name, devices, shape):
    check(name, devices, shape, seed=devices)


@pytest.mark.slow
@everywhere
@pytest.mark.parametrize("devices", [3, 8])
@pytest.mark.parametrize("m", [1, 65, 300])
@pytest.mark.parametrize("n", [8, 200])
@pytest.mark.parametrize("k", [8, 72, 328])
def test_every_shape_and_team(name, devices, m, k, n):
    check(name, devices, (m, k, n))


@everywhere
@pytest.mark.parametrize(
    ("dtype", "out_dtype"),
    [
        pytest.param(BF16, F32, marks=pytest.mark.slow),
        pytest.param(F16, None, marks=pytest.mark.slow),
        (F16, BF16),
    ],
    ids=["wide", "f16", "mixed"],
)
def test_types(name, dtype, out_dtype):
    check(name, 2, (40, 72, 72), dtype=dtype, out_dtype=out_dtype)


@everywhere
@pytest.mark.parametrize("transposed", [slow(False), True])
def test_transposed_with_an_epilogue_and_what_was_gathered(name, transposed):
    lhs, rhs = cases.operands(*cases.whole(name, 3, 24, 72, 40))
    given = rhs.T if transposed else rhs

    def call(lhs, rhs):
        return st.all_gather_matmul(
            lhs,
            rhs,
            "x",
            gather_axis=name[-1],
            rhs_transposed=transposed,
            epilogue=lambda x: jnp.maximum(x, 0),
            return_gathered=True,
            out_dtype=F32,
        )

    out_specs = sides(name)[2], P(None, None)
    program = mapped(name, call, 3, transposed=transposed, out_specs=out_specs)
    out, gathered = program(jnp.asarray(lhs, BF16), jnp.asarray(given, BF16))
    np.testing.assert_array_equal(np.asarray(out), np.maximum(lhs @ rhs, 0))
    np.testing.assert_array_equal(
        np.asarray(gathered, np.float32), given if name[-1] == "n" else lhs
    )


@pytest.mark.parametrize(
    ("devices", "kept"), [slow(2, False), slow(2, True), slow(3, False), (3, True)]
)
def test_shards_of_which_two_are_as_wide_as_a_piece(devices, kept):
    """2 x 128 columns lie side by side on 2 devices, or on 3 without the own ones."""
    name = "all_gather_matmul_k"
    lhs, rhs = cases.operands(*cases.whole(name, devices, 20, 128, 8))
    call = functools.partial(
        st.all_gather_matmul, axis_name="x", gather_axis="k", out_dtype=F32, return_gathered=kept
    )
    out_specs = (sides(name)[2], P(None, None)) if kept else None
    program = mapped(name, call, devices, out_specs=out_specs)
    out = program(jnp.asarray(lhs, BF16), jnp.asarray(rhs, BF16))
    if kept:
        out, gathered = out
        np.testing.assert_array_equal(np.asarray(gathered, np.float32), lhs)
    np.testing.assert_array_equal(np.asarray(out), lhs @ rhs)


@pytest.mark.parametrize("transposed", [pytest.param(False, marks=pytest.mark.slow), True])
def test_several_right_hand_sides_of_columns_with_one_gather(transposed, simulation):
    """And their derivatives, through the sum of their products."""
    name, sizes = "all_gather_matmul_k", (40, 136)
    lhs = jnp.asarray(cases.whole_numbers(0, 20, 48), BF16)
    rhs = [jnp.asarray(cases.whole_numbers(i, 48, 2 * n), BF16) for i, n in enumerate(sizes, 1)]
    in_specs = (sides(name)[0], *[sides(name, transposed=transposed)[1]] * 2)

    def by(backend):
        def call(lhs, *rhs):
            def loss(lhs, rhs):
                outs, gathered = st.all_gather_matmul(
                    lhs,
                    rhs,
                    "x",
                    gather_axis="k",
                    rhs_transposed=transposed,
                    return_gathered=True,
                    backend=backend,
                )
                weighed = [
                    jnp.sum(x.astype(F32) * (jnp.arange(x.size).reshape(x.shape) % largest))
                    for x, largest in zip((*outs, gathered), (3, 4, 2), strict=True)
                ]
                return sum(weighed), (outs, gathered)

            return jax.grad(loss, (0, 1), has_aux=True)(lhs, rhs)

        columns = sides(name)[2]
        out_specs = ((in_specs[0], in_specs[1:]), ((columns, columns), P()))
        program = jax.shard_map(
            call, mesh=cases.mesh_of(2), in_specs=in_specs, out_specs=out_specs, check_vma=False
        )
        return jax.jit(program)(lhs, *(x.T if transposed else x for x in rhs))

    got, want = by("simulator"), by("xla")
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert g.shape == w.shape and g.dtype == w.dtype
        np.testing.assert_array_equal(np.asarray(g, np.float32), np.asarray(w, np.float32))
    assert simulation.launches == 4  # forward; scatter the products; what was gathered; gather


@pytest.mark.parametrize(
    ("seed", "schedule"),
    [
        pytest.param(1, "random", marks=pytest.mark.slow),
        (2, "pct"),
        pytest.param(3, "round_robin", marks=pytest.mark.slow),
    ],
)
def test_more_bands_than_one(seed, schedule):
    """Bands of two tiles; more tiles than blocks; the last band, chunk and piece cut off."""
    tiles = TileConfig(tile_n=64, num_stages=2, store_buffers=1, raster_width=2)
    config = all_gather_matmul_k.Config(tiles=tiles, pull_columns=64)
    with st.simulate(seed=seed, schedule=schedule, core_count=3) as report:
        check("all_gather_matmul_k", 3, (390, 200, 72), seed=seed, config=config)
    assert report.ok, str(report)


@pytest.mark.slow  # On GPUs every configuration is run, and each is compiled.
def test_every_config_of_columns():
    configs = list(all_gather_matmul_k.Config.candidates())
    assert len(set(configs)) == len(configs) >= 2
    for number, config in enumerate(configs):
        check("all_gather_matmul_k", 2, (140, 72, 136), config=config, seed=number)


def gradients(name, call, *operands, transposed=False, check_vma=False):
    product = mapped(name, call, transposed=transposed, check_vma=check_vma)

    def loss(*operands):
        out = product(*operands).astype(F32)
        return jnp.sum(out * jnp.sin(jnp.arange(out.size, dtype=F32)).reshape(out.shape))

    return jax.jit(jax.grad(loss, (0, 1)))(*operands)


def operands(name, m=20, k=24, n=40):
    return [jnp.asarray(x, BF16) for x in cases.operands(*cases.whole(name, 2, m, k, n))]


@everywhere
@pytest.mark.parametrize(
    ("transposed", "kept", "check_vma"), [slow(False, False, True), (True, True, False)]
)
def test_gradients_are_those_of_pure_lax_and_fused(name, transposed, kept, check_vma, simulation):
    lhs, rhs = operands(name)

    def call(lhs, rhs):
        out = st.all_gather_matmul(
            lhs,
            rhs,
            "x",
            gather_axis=name[-1],
            rhs_transposed=transposed,
            epilogue=jnp.tanh,
            keep_gathered=kept,
            out_dtype=F32,
        )
        return jnp.sin(out)

    given = rhs.T if transposed else rhs
    got = gradients(name, call, lhs, given, transposed=transposed, check_vma=check_vma)
    want = gradients(name, lambda *xs: jnp.sin(jnp.tanh(pure_lax(name, *xs))), lhs, rhs)
    assert_same(got, (want[0], want[1].T if transposed else want[1]))
    # Forward; the gradient of what is gathered, scattered; and the other's, gathered again.
    assert simulation.launches == (2 if kept else 3)


@mostly
def test_gradients_by_xla_and_of_what_was_gathered(name):
    def gradient(backend):
        def call(lhs, rhs):
            out, gathered = st.all_gather_matmul(
                lhs, rhs, "x", gather_axis=name[-1], return_gathered=True, backend=backend
            )
            weights = jnp.arange(gathered.size, dtype=BF16).reshape(gathered.shape) % 3
            return out + jnp.sum(gathered * weights)

        return gradients(name, call, *operands(name))

    assert_same(gradient("simulator"), gradient("xla"))


@pytest.mark.slow
@everywhere
def test_scan_over_layers_with_remat(name):
    lhs, rhs = operands(name, 16, 32, 32)
    layers = jnp.stack([rhs, -2 * rhs])

    def network(product, lhs, layers):
        def layer(total, rhs):
            out = checkpoint_name(product(lhs, rhs).astype(F32), "product")
            return total + jnp.sum(jnp.tanh(out / 16)), None

        return lax.scan(jax.checkpoint(layer), jnp.float32(0), layers)[0]

    def by(call):
        loss = functools.partial(network, mapped(name, call, check_vma=True))
        return jax.jit(jax.grad(loss, (0, 1)))(lhs, layers)

    assert_same(
        by(lambda *xs: st.all_gather_matmul(*xs, "x", gather_axis=name[-1])),
        by(functools.partial(pure_lax, name)),
        tolerance=3e-2,
    )


@everywhere
@pytest.mark.parametrize("backend", ["xla", "pallas"])
def test_no_collective_that_is_not_needed(name, backend):
    xs = operands(name)
    program = cases.mapped(name, cases.mesh_of(2), backend=backend)

    def loss(*xs):
        return jnp.sum(jnp.sin(program(*xs).astype(F32)))

    compiled = jax.jit(jax.grad(loss, (0, 1))).lower(*xs).compile()
    found = cases.collectives(compiled.as_text())
    assert found.pop("all-reduce", 0) <= 1, found  # The loss of whole arrays.
    if backend == "xla":
        assert found.pop("all-gather") <= 2 and found.pop("reduce-scatter") == 1
    assert not found


@mostly
def test_nan_and_infinity_stay_in_their_rows_and_columns(name):
    lhs, rhs = cases.operands(*cases.whole(name, 2, 9, 8, 8))
    lhs[1, 2], lhs[3, 1] = np.nan, np.inf
    rhs[:2, 0] = [1, -1]
    rhs[-1, 3] = np.inf
    out = cases.run(name, lhs, rhs, out_dtype=F32)
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(out, lhs @ rhs)
