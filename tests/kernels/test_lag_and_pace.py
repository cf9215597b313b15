"""A warpgroup that is behind the other, and a matrix loaded along the contraction, when tried."""

from __future__ import annotations

import dataclasses

import fused_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from local_epilogue import local_epilogue

import stretto as st
from stretto.distributed.simulator import DeadlockError, SimulatorParams
from stretto.kernels.engine.hopper.applying import Applying
from stretto.kernels.engine.hopper.lagging import Lag
from stretto.kernels.engine.hopper.lagging import scratch as lagging_scratch
from stretto.kernels.engine.hopper.tile_config import TileConfig
from stretto.kernels.fused.local_matmul import local_matmul
from stretto.kernels.problem import trials

M, K, N = 200, 320, 272  # Five stages; two tiles down, and two across of 256 columns.
TILES = TileConfig(num_stages=2, store_buffers=2)


def draw(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(cases.whole_numbers(seed, *shape), jnp.bfloat16)


def lagging(**settings):
    """The product of a kernel, and what it should be; on one device, one block."""
    x, w = draw(0, M, K), draw(1, K, N)
    with st.simulate(seed=3, core_count=1, **settings), trials.asked(lag=2):
        found = local_matmul(x, w, interpret=SimulatorParams())
        found = np.asarray(found, np.float32)
    return found, np.asarray((x.astype(jnp.float32) @ w).astype(x.dtype), np.float32)


def with_residual(config, k, **settings):
    """The same of a product of `k` columns and a residual."""
    x, w, r = draw(0, M, k), draw(1, k, N), draw(2, M, N)
    epilogue = st.epilogues.residual(r)
    tried = trials.asked(lag=1, paced=True)
    with st.simulate(seed=3, core_count=1, **settings), tried:
        found = local_epilogue(x, [w], epilogue, config=config, interpret=SimulatorParams())
        found = np.asarray(found, np.float32)
    expected = (x.astype(jnp.float32) @ w + r).astype(x.dtype)
    return found, np.asarray(expected, np.float32)


def test_products_of_a_warpgroup_that_is_behind():
    found, expected = lagging()
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("config", "k"),
    [
        (TILES, 576),  # Nine stages, of which the third and the sixth bring a piece.
        pytest.param(dataclasses.replace(TILES, store_buffers=4), 960, marks=pytest.mark.slow),
        pytest.param(TILES, 136, marks=pytest.mark.slow),  # Too few.
    ],
)
def test_a_matrix_that_is_loaded_along_the_contraction(config, k):
    found, expected = with_residual(config, k)
    np.testing.assert_array_equal(found, expected)


def test_the_second_warpgroup_waits_for_the_first(monkeypatch):
    """Without the first one's word it waits for ever."""
    arrive = plgpu.barrier_arrive

    def finish(self, products, acc, pause, stage):
        monkeypatch.setattr(plgpu, "barrier_arrive", deaf(self.first_started))
        try:
            return original(self, products, acc, pause, stage)
        finally:
            monkeypatch.setattr(plgpu, "barrier_arrive", arrive)

    def deaf(barrier):
        return lambda ref: None if ref is barrier else arrive(ref)

    original = Lag.finish
    monkeypatch.setattr(Lag, "finish", finish)
    with pytest.raises(DeadlockError, match="first_started"):
        lagging()


@pytest.mark.slow
def test_a_buffer_is_not_overwritten_before_it_is_stored(monkeypatch):
    monkeypatch.setattr(Applying, "_load_when_free", Applying.load_piece)
    with pytest.raises(DeadlockError, match="race on out_smem"):
        with_residual(TILES, 576, on_finding="record")


def test_a_lag_is_asked_for_where_a_program_is_traced():
    assert trials.current() == trials.Trials()
    with trials.asked(lag=2):
        assert trials.current() == trials.Trials(lag=2)
        # At most the stages of the ring, and of two warpgroups.
        assert "first_started" in lagging_scratch(TILES)
        assert not lagging_scratch(TileConfig(tile_m=192, tile_n=128))
    assert not lagging_scratch(TILES)
    with pytest.raises(ValueError, match="lag=-1 must be at least 0"), trials.asked(lag=-1):
        pass
