"""What the engine is made of: folds and main loops that are not its own, and parts that fit."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scaled_matmul
from fused_cases import whole_numbers

import stretto as st
from stretto.kernels.engine import sinks, streams, tiles
from stretto.kernels.engine.architectures import TILES, mainloop_of
from stretto.kernels.engine.fuse import fuse
from stretto.kernels.engine.hopper.matmul import Matmul
from stretto.kernels.engine.hopper.tile_config import TileConfig
from stretto.kernels.engine.orders import ShardOrder
from stretto.kernels.engine.parts import Addends, Arrival, Parts, Product, Sum, Transfer
from stretto.kernels.engine.segments import Segments

FP8 = jnp.float8_e4m3fn
PRODUCT = Product(lhs=jnp.bfloat16, rhs=jnp.bfloat16, out=jnp.bfloat16)


def test_a_fold_of_another_main_loop():
    """Blocks of rhs with a scale each: exact, since scales are powers of two."""
    m, k, n = 256, 384, 256
    lhs, rhs = whole_numbers(0, m, k), whole_numbers(1, n, k)
    scales = 2.0 ** whole_numbers(2, n // 128, k // 128)
    with st.simulate(seed=0, core_count=2) as report:
        out = jax.jit(scaled_matmul.scaled_matmul)(
            jnp.asarray(lhs, FP8), jnp.asarray(rhs, FP8), jnp.asarray(scales, jnp.float32)
        )
    assert report.ok, str(report)
    expected = lhs @ (rhs * np.repeat(np.repeat(scales, 128, 0), 128, 1)).T
    np.testing.assert_array_equal(np.asarray(out), expected)


def test_a_fold_that_a_main_loop_does_not_have():
    product = dataclasses.replace(PRODUCT, fold=scaled_matmul.Scaled)
    with pytest.raises(NotImplementedError, match="Matmul has no fold Scaled; it has Sum, Addends"):
        mainloop_of(TileConfig(), product)


def test_tiles_of_an_architecture_without_a_main_loop():
    with pytest.raises(NotImplementedError, match="for no main loop that is built; pass a TileCon"):
        mainloop_of(object(), PRODUCT)


def test_every_architecture_has_its_main_loop():
    for architecture, presets in TILES.items():
        kinds = presets.narrow, presets.narrowest, *presets.large_ones, *presets.adding
        for tile in kinds:
            tile.check()
            assert tile.architecture == architecture
            assert mainloop_of(tile, PRODUCT).config is tile


CONFIG = TileConfig(tile_n=64)
WAITS = Arrival(columns=64, wait=lambda tile, gate: None)


@pytest.mark.parametrize(
    ("changes", "announced", "message"),
    [
        ({}, dict(waits=True), "do not have an Arrival (waits), and fuse() was told that they do."),
        (dict(arrival=WAITS), {}, "have an Arrival (waits), and fuse() was told that they do not"),
        ({}, dict(signals=True), "do not have a Sink with `stored`"),
        (dict(transfer=Transfer(run=lambda: None)), {}, "have a Transfer (team)"),
        (
            {},
            dict(fold=Addends),
            "its fold is Sum and the main loop was made for Addends; they must be the same.",
        ),
    ],
)
def test_parts_that_are_not_those_that_were_announced(changes, announced, message):
    announced = dict(announced)
    product = dataclasses.replace(PRODUCT, fold=announced.pop("fold", PRODUCT.fold))
    assert message in refused(mainloop_of(CONFIG, product), changes, **announced)


class Greedy(Matmul):
    """A main loop that announces a warp that has no role."""

    @property
    def warps(self) -> int:
        return 3


def test_roles_that_are_not_those_that_were_announced():
    message = "take 2 warpgroups and 2 warps, which announced 2 and 3; they must agree."
    assert message in refused(Greedy(CONFIG, PRODUCT), {})


class Hungry(Matmul):
    """A main loop whose roles take as many registers as a multiprocessor has."""

    @property
    def registers(self):
        return {Sum: (80, 216)}


def test_roles_that_take_more_registers_than_a_block_starts_with():
    message = "216 + 216 + 80 registers for a thread of each warpgroup, and a block of 3 warpgroups"
    said = refused(Hungry(CONFIG, PRODUCT), {})
    assert message in said and "starts with 168 each, 504 together" in said


def refused(mainloop, changes, **announced):
    """What `fuse` says of a kernel of these parts."""
    changes, config = dict(changes), CONFIG
    order = ShardOrder(128, 64, config)
    arrival = changes.pop("arrival", None)

    def parts(refs):
        lhs = streams.of(refs.lhs, lambda tile, k: tiles.lhs_window(config, tile.m, k))
        return Parts(
            order=order,
            k_tiles=1,
            lhs=dataclasses.replace(lhs, arrival=arrival),
            rhs=streams.of(refs.rhs, lambda tile, k: tiles.rhs_window(config, k, tile.n)),
            sink=sinks.along_n([refs.out], Segments.of([64], 64), config),
            **changes,
        )

    def call(lhs, rhs):
        return fuse(
            parts,
            name="parts",
            team=None,
            mainloop=mainloop,
            num_tiles=order.num_tiles,
            operands=dict(lhs=lhs, rhs=rhs),
            outs=dict(out=jax.ShapeDtypeStruct((128, 64), jnp.bfloat16)),
            **announced,
        )

    with st.simulate(core_count=1), pytest.raises(ValueError) as error:
        jax.eval_shape(call, jnp.zeros((128, 64), jnp.bfloat16), jnp.zeros((64, 64), jnp.bfloat16))
    assert "kernel parts:" in str(error.value)
    return str(error.value)
