"""The activation in the grouped product of experts' rows: numbers, waits, and a layer with it."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from expert_cases import EXPERTS, layer_operands, simulated_layer
from fused_cases import BF16, F32, rounded, whole_numbers
from scaled_cases import powers_of_two
from selection import slow

import stretto as st
from stretto.distributed.simulator import SimulationError
from stretto.kernels.engine.hopper.applying import Applying
from stretto.kernels.engine.hopper.tile_config import LARGE, TileConfig
from stretto.kernels.fused import dispatch_matmul, group_activation
from stretto.kernels.fused.activated import Activated
from stretto.kernels.operations import mixture_rules
from stretto.kernels.operations.mixture_steps import Layer, Operands, Options

TILES = TileConfig(tile_n=128, num_stages=2, store_buffers=1)
CONFIG = dispatch_matmul.Config(tiles=TILES, pull_slots=2)
SIZES = (5, 0, 131, 12)  # Of groups; some rows belong to none.
ROWS, WIDTH = 168, 128


def both(gate, up):
    return jnp.maximum(gate, 0) * (up + 1)


def relu(x):
    return jnp.maximum(x, 0)


def activated(rows, sizes, *sides, f, gated, biases):
    """The kernel, of `biases` of the last operands."""
    sides, given = sides[: len(sides) - biases], sides[len(sides) - biases :]
    function = both if gated else relu
    how: dict[str, Any] = dict(gated=gated, tiles=TILES)
    assert group_activation.obstacle(rows, sides, function, **how) is None
    product = Activated.of(sides, given, function, **how)
    assert product.width == f
    return group_activation.activated_product(rows, sizes, product, interpret=None)


def by_numpy(rows, sides, biases):
    """`[rows, f]` in float32, of the rows that belong to a group; one or two sides."""
    ends = np.cumsum(SIZES)
    out = np.zeros((ends[-1], sides[0].shape[2]), np.float32)
    for group, (size, end) in enumerate(zip(SIZES, ends, strict=True)):
        own = slice(end - size, end)
        products = [rows[own] @ side[group] for side in sides]
        if biases:
            products = [x + bias[group] for x, bias in zip(products, biases, strict=True)]
        out[own] = np.maximum(products[0], 0) * (products[1] + 1 if len(sides) == 2 else 1)
    return out


@pytest.mark.parametrize(
    ("f", "gated", "in_one", "biased"),
    [
        (192, True, True, True),  # The last tile of gates reaches into the columns of up.
        pytest.param(192, True, True, False, marks=pytest.mark.slow),
        pytest.param(64, True, True, True, marks=pytest.mark.slow),
        pytest.param(136, True, False, True, marks=pytest.mark.slow),
        pytest.param(200, False, False, True, marks=pytest.mark.slow),
        pytest.param(128, False, False, False, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("seed", [0, slow(1)])
def test_activation_of_products(f, gated, in_one, biased, seed):
    """Of groups of any size; with whole numbers no sum is rounded."""
    count = 1 + gated
    rows = whole_numbers(seed, ROWS, WIDTH, largest=1)
    sides = [whole_numbers(seed + 1 + i, len(SIZES), WIDTH, f, largest=1) for i in range(count)]
    biases = [whole_numbers(seed + 5 + i, len(SIZES), f) for i in range(count)] if biased else []
    given = [np.concatenate(x, -1) if in_one and x else x for x in (sides, biases)]
    given = [[x] if isinstance(x, np.ndarray) else x for x in given]
    call = functools.partial(activated, f=f, gated=gated, biases=len(given[1]))
    with st.simulate(seed=seed, core_count=3) as report:
        operands = [jnp.asarray(x, BF16) for x in (rows, *given[0], *given[1])]
        found = jax.jit(call)(operands[0], jnp.array(SIZES, jnp.int32), *operands[1:])
        found = np.asarray(found, np.float32)
    assert report.ok and report.launches == 1, str(report)
    wanted = by_numpy(rows, sides, biases)
    np.testing.assert_array_equal(found[: len(wanted)], rounded(wanted, BF16))


def in_8_bits(rows, of_rows, sizes, sides, of_sides, *, gated, tiles):
    """The kernel, in bfloat16; matrices are transposed."""
    function = both if gated else relu
    how: dict[str, Any] = dict(gated=gated, tiles=tiles)
    assert group_activation.obstacle(rows, sides, function, **how) is None
    product = Activated.of_8_bits(rows, of_rows, sides, of_sides, sizes, function, **how)
    return group_activation.activated_product(rows, sizes, product, out_dtype=BF16, interpret=None)


@pytest.mark.parametrize(
    ("f", "gated", "in_one"),
    [
        (192, True, True),  # The last tile of gates reaches into the columns of up.
        pytest.param(192, True, False, marks=pytest.mark.slow),
        pytest.param(128, False, False, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("seed", [0, slow(1)])
def test_activation_of_products_in_8_bits(f, gated, in_one, seed):
    """With scales of rows and columns; powers of two are exact."""
    tiles = TileConfig(tile_n=128, tile_k=128, num_stages=2, store_buffers=1)
    count, groups = 1 + gated, len(SIZES)
    rows = whole_numbers(seed, ROWS, WIDTH, largest=1)
    of_rows = powers_of_two(seed + 9, ROWS, 1)
    of_rows[sum(SIZES) :] = np.nan  # Of no group.
    sides = [whole_numbers(seed + 1 + i, groups, f, WIDTH, largest=1) for i in range(count)]
    scales = [powers_of_two(seed + 5 + i, groups, f, 1) for i in range(count)]
    wanted = by_numpy(rows * of_rows, [(x * s).mT for x, s in zip(sides, scales, strict=True)], [])
    given = [[np.concatenate(x, 1)] if in_one else x for x in (sides, scales)]
    e4m3 = [jnp.asarray(x, jnp.float8_e4m3fn) for x in (rows, *given[0])]
    call = functools.partial(in_8_bits, gated=gated, tiles=tiles)
    with st.simulate(seed=seed, core_count=3) as report:
        of_sides = [jnp.asarray(x, F32) for x in given[1]]
        sizes = jnp.array(SIZES, jnp.int32)
        found = jax.jit(call)(e4m3[0], jnp.asarray(of_rows, F32), sizes, e4m3[1:], of_sides)
        found = np.asarray(found, np.float32)
    assert report.ok and report.launches == 1, str(report)
    np.testing.assert_array_equal(found[: len(wanted)], rounded(wanted, BF16))


@pytest.mark.parametrize("bug", ["begin", slow("end")])
def test_each_wait_for_biases_is_needed(monkeypatch, bug):
    """Of a product whose tiles are stored in part: what comes before, and after a tile's pieces."""
    jax.clear_caches()
    monkeypatch.setattr(Applying, bug, lambda self: None)
    call = functools.partial(activated, f=192, gated=True, biases=1)
    shapes = [(ROWS, WIDTH), (len(SIZES), WIDTH, 384), (len(SIZES), 384)]
    rows, w_in, bias = (jnp.asarray(whole_numbers(0, *shape), BF16) for shape in shapes)
    found = False
    for seed in range(3):
        try:
            with st.simulate(seed=seed, core_count=2, on_finding="record") as report:
                out = jax.jit(call)(rows, jnp.array(SIZES, jnp.int32), w_in, bias)
                jax.block_until_ready(out)
            found = not report.ok
        except SimulationError:
            found = True
        if found:
            break
    jax.clear_caches()
    assert found


@pytest.mark.slow
@pytest.mark.parametrize("under", [False, True])
def test_a_layer(under):
    """With the dispatch under the product, and before it: as in steps, but for a rounding."""
    given = layer_operands(64)
    config = mixture_rules.Config(under_product=under, activation_in_product=False, product=CONFIG)
    plain, launches = simulated_layer(config, lambda layer: layer, *given)
    config = mixture_rules.Config(under_product=under, activation_in_product=True, product=CONFIG)
    found, as_many = simulated_layer(config, lambda layer: layer, *given)
    assert as_many == launches
    assert (found != plain).any()  # It is the sums that are activated, before they are rounded.
    np.testing.assert_allclose(
        found.astype(np.float32), plain.astype(np.float32), atol=np.abs(plain).max() / 64
    )


@pytest.mark.slow
def test_a_derivative_wants_the_product():
    """So a layer that is differentiated is that of steps, bit by bit."""
    x, index, weights, w_in, w_out = layer_operands(64)

    def gradients(layer):
        def loss(x, weights, w_in, w_out):
            return jnp.sum(layer(x, index, weights, w_in, w_out).astype(F32))

        return jax.value_and_grad(loss, (0, 1, 2, 3))

    found = [
        simulated_layer(
            mixture_rules.Config(activation_in_product=given, product=CONFIG),
            gradients,
            *(x, weights, w_in, w_out),
        )
        for given in (False, True)
    ]
    assert found[0][1] == found[1][1]
    for plain, activating in zip(*(jax.tree.leaves(x[0]) for x in found), strict=True):
        np.testing.assert_array_equal(plain, activating)


def of_each_place(gate, up):
    return gate * jnp.arange(gate.shape[1]) + up


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(dtype=F32), "bfloat16, float16 and 8 bits, not float32"),
        (dict(tiles=TileConfig(tile_n=192)), "tile_n=192 of gate and up is no multiple of 128"),
        (dict(f=96), "up begins at column 96 of w_in, which is no multiple of 64"),
        (dict(tokens=0), "nothing to do"),
        (dict(tiles=None), "built for Hopper GPUs only"),
        (dict(function=lambda gate, up: jnp.sort(gate) * up), "mixes|element"),
        (dict(function=of_each_place), "depends on"),
        (dict(function=lambda gate, up: jax.lax.erf(gate) * up), "erf"),
    ],
)
def test_what_it_does_not_take(changes, words):
    """Which is then made of the stored product."""
    given = dict(tokens=16, f=64, dtype=BF16, tiles=LARGE, function=both) | changes
    x = jax.ShapeDtypeStruct((given["tokens"], 128), given["dtype"])
    w_in = jax.ShapeDtypeStruct((EXPERTS, 128, 2 * given["f"]), given["dtype"])
    found = group_activation.obstacle(
        x, [w_in], given["function"], gated=True, tiles=given["tiles"]
    )
    assert found is not None
    assert any(word in found for word in words.split("|")), found


@pytest.mark.parametrize(
    ("gated", "biased", "config", "served"),
    [
        (True, False, {}, True),
        (True, True, {}, False),
        (False, False, {}, False),
        (True, True, dict(any_activation=True), True),
        (False, False, dict(any_activation=True), True),
        (True, False, dict(activation_in_product=False), False),
        (True, False, None, False),
    ],
)
def test_what_is_served_by_default(gated, biased, config, served):
    """What was run on hardware."""
    x, w_in = (jax.ShapeDtypeStruct(shape, BF16) for shape in ((16, 128), (EXPERTS, 128, 256)))
    bias = (jax.ShapeDtypeStruct((EXPERTS, 256), BF16),) if biased else None
    given = Operands(x, None, None, None, (w_in,), None, bias, None)
    how = Options(
        rows=64, wire_dtype=BF16, activation=both if gated else relu, gated=gated, matmuls="auto"
    )
    config = None if config is None else mixture_rules.Config(**config)
    call: Any = SimpleNamespace(config=config, options=how)
    assert Layer(given, call).activates_in_product() == served


def test_it_is_the_default_and_both_are_tried():
    assert mixture_rules.Config().activation_in_product
    tried = {config.activation_in_product for config in mixture_rules.Config.candidates()}
    assert tried == {False, True}
