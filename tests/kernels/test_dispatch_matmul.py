"""Dispatch under the grouped matmul: rows and products, tables of sources; every wait is needed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from expert_cases import (
    EXPERTS,
    Without,
    layer_operands,
    on_devices,
    routings,
    simulated_layer,
)
from fused_cases import BF16, F32, whole_numbers
from jax.sharding import PartitionSpec as P
from selection import slow

import stretto as st
from stretto.distributed.simulator import SimulationError
from stretto.distributed.team import Team
from stretto.kernels.engine import gates
from stretto.kernels.engine.hopper.tile_config import TileConfig
from stretto.kernels.fused import dispatch_matmul
from stretto.kernels.operations import mixture_rules
from stretto.kernels.operations.expert_checks import room_for
from stretto.kernels.xla import experts as xla
from stretto.kernels.xla.routing import route

SMALL = TileConfig(tile_n=64, num_stages=2, store_buffers=1)
CONFIG = dispatch_matmul.Config(tiles=SMALL, pull_slots=2)


def dispatched_product(devices: int, *, transposed: bool = False):
    """`(x, index, rhs)` -> rows, product and group sizes."""

    def body(x, index, rhs):
        rows = room_for(*index.shape, devices, None)
        routing = route(index, ("x",), num_experts=EXPERTS, rows=rows)
        found, out = dispatch_matmul.dispatch_matmul(
            x,
            xla.sources_of_rows(routing.positions, ("x",), rows=rows),
            routing.group_sizes,
            rhs,
            Team.along(("x",)),
            config=CONFIG,
            rhs_transposed=transposed,
            interpret=None,
        )
        return found, out, routing.group_sizes

    return on_devices(body, devices, 3, (P("x"),) * 3)


def check(devices, x, index, rhs, found, out, sizes):
    """Each row where it belongs, its product, and nothing beyond the last row."""
    found, out = (np.asarray(y, np.float32).reshape(devices, -1, y.shape[1]) for y in (found, out))
    own = EXPERTS // devices
    for device in range(devices):
        first = 0
        for expert in range(device * own, (device + 1) * own):
            tokens = np.nonzero(index == expert)[0]
            rows = slice(first, first + len(tokens))
            np.testing.assert_array_equal(found[device, rows], x[tokens])
            np.testing.assert_array_equal(out[device, rows], x[tokens] @ rhs[expert])
            first += len(tokens)
        assert np.asarray(sizes).reshape(devices, -1)[device].sum() == first
        assert not out[device, first:].any()


@pytest.mark.parametrize(
    ("devices", "seed", "width"),
    [(4, 0, 128)]
    + [
        pytest.param(devices, seed, width, marks=pytest.mark.slow)
        for devices in (2, 8)
        for seed in range(10)
        for width in (192, 320)
    ],
)
def test_rows_and_products(devices, seed, width):
    """Of each routing in turn by one program, also where a device has rows of no expert.

    With rhs transposed at one of the widths.
    """
    cases = routings(devices, seed)
    names = ["zipf", "all to one"] if seed == 0 else list(cases)
    x = whole_numbers(seed, len(cases["any"]), width, largest=1)
    rhs = whole_numbers(seed + 1, EXPERTS, width, 72, largest=1)
    program = dispatched_product(devices, transposed=width == 192)
    for name in names:
        with st.simulate(seed=seed, core_count=3) as report:
            given = (
                jnp.asarray(x, BF16),
                jnp.asarray(cases[name], jnp.int32),
                jnp.asarray(rhs, BF16),
            )
            found = jax.tree.map(np.asarray, program(*map(jnp.asarray, given)))
        assert report.ok and report.launches == 1, str(report)
        check(devices, x, cases[name], rhs, *found)


def test_sources_of_rows():
    """Where rows are from, as places on the ring; 0 where there are none."""
    devices, rows = 4, 80
    index = routings(devices, 1)["any"]

    def body(index):
        routing = route(index, ("x",), num_experts=EXPERTS, rows=rows)
        return xla.sources_of_rows(routing.positions, ("x",), rows=rows)

    found = np.asarray(on_devices(body, devices, 1)(jnp.asarray(index, jnp.int32)))
    tokens = len(index) // devices
    for device, own in enumerate(found.reshape(devices, rows)):
        held = range(device * EXPERTS // devices, (device + 1) * EXPERTS // devices)
        wanted = np.concatenate([np.nonzero(index == expert)[0] for expert in held])
        source, offset = own // devices, own % devices
        whose = (device + offset[: len(wanted)]) % devices
        np.testing.assert_array_equal(whose * tokens + source[: len(wanted)], wanted)
        assert not own[len(wanted) :].any()


BUGS = {
    "rows have arrived": (dispatch_matmul._Pull, "_wait_for"),
    "the last piece has arrived": (dispatch_matmul._Pull, "_wait_for"),
    "the load waits": (gates.Gates, "go_through"),
    "a piece is in shared memory": (dispatch_matmul, "barrier_wait"),
    "stores are complete": (dispatch_matmul, "wait_smem_to_gmem"),
}
"""What is left out."""


# The last three are those of `test_expert_dispatch.py` and of the main loop.
@pytest.mark.parametrize("bug", [*list(BUGS)[:2], *map(slow, list(BUGS)[2:])])
def test_each_wait_is_needed(monkeypatch, bug):
    jax.clear_caches()
    where, name = BUGS[bug]
    if where is dispatch_matmul:
        monkeypatch.setattr(where, "plgpu", Without(where.plgpu, name))
    elif bug == "the last piece has arrived":

        def one_too_few(self, block):
            rows = jnp.clip(self.refs.pulled_rows[0] - block * self.tile_m, 0, self.tile_m)
            self.refs.received.at[block].wait(jnp.maximum(rows * self.row.pieces - 1, 0))

        monkeypatch.setattr(where, name, one_too_few)
    else:
        monkeypatch.setattr(where, name, lambda *_: None)
    tokens = 12  # Of a device.
    index = np.random.default_rng(0).integers(0, EXPERTS, (2 * tokens, 3))
    x, rhs = whole_numbers(0, 2 * tokens, 128), whole_numbers(1, EXPERTS, 128, 64)
    found = False
    for seed in range(3):
        try:
            with st.simulate(seed=seed, core_count=2, on_finding="record") as report:
                given = jnp.asarray(x, BF16), jnp.asarray(index, jnp.int32), jnp.asarray(rhs, BF16)
                jax.block_until_ready(dispatched_product(2)(*given))
            found |= not report.ok
        except SimulationError as error:
            assert "is outside" not in str(error)  # That would be this test's own mistake.
            found = True
        if found:
            break
    jax.clear_caches()
    assert found


def of_a_layer(fused: bool, program, *given, **settings):
    config = mixture_rules.Config(under_product=fused, product=CONFIG)
    return simulated_layer(config, program, *given, **settings)


@pytest.mark.slow
def test_a_layer():
    """The same bits as in two steps, of which one is a launch less."""
    given = layer_operands(32)
    plain, launches = of_a_layer(False, lambda layer: layer, *given)
    fused, fewer = of_a_layer(True, lambda layer: layer, *given)
    assert fewer == launches - 1
    np.testing.assert_array_equal(fused, plain)


@pytest.mark.slow
@pytest.mark.parametrize("sides", [1, 2])
def test_gradients_of_a_layer(sides):
    """Also those of the backward pass, which dispatches cotangents likewise; gate and up in one
    matrix, or in two.
    """
    x, index, weights, w_in, w_out = layer_operands(32)
    w_in = w_in if sides == 1 else tuple(jnp.split(w_in, 2, axis=2))

    def gradients(layer):
        def loss(x, weights, w_in, w_out):
            return jnp.sum(layer(x, index, weights, w_in, w_out).astype(F32))

        return jax.value_and_grad(loss, (0, 1, 2, 3))

    plain, launches = of_a_layer(False, gradients, x, weights, w_in, w_out)
    fused, fewer = of_a_layer(True, gradients, x, weights, w_in, w_out)
    assert fewer == launches - 2
    for got, want in zip(jax.tree.leaves(fused), jax.tree.leaves(plain), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("x", "rows", "words"),
    [
        (((8, 128), F32), 64, "bfloat16 and float16, not float32"),
        (((8, 72), BF16), 64, "d=72 are no multiple of 64"),
        (((8, 64), BF16), 64, "d=64 are no multiple of 64, or just one"),
        (((8, 128), BF16), 60, "60 rows is no multiple of 8"),
        (((0, 128), BF16), 64, "nothing to do"),
    ],
)
def test_what_it_does_not_take(x, rows, words):
    """Which is then made in two steps."""
    rhs = jax.ShapeDtypeStruct((4, 128, 64), BF16)
    found = dispatch_matmul.obstacle(jax.ShapeDtypeStruct(*x), rhs, rows, SMALL)
    assert words in found


def test_a_configuration_that_does_not_fit():
    with pytest.raises(ValueError, match=r"bytes of shared memory .*take fewer stages or slots"):
        mixture_rules.Config(
            under_product=True, product=dispatch_matmul.Config(pull_slots=8)
        ).check()
