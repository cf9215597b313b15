"""A matrix of an epilogue that is loaded along the contraction, between the stages."""

from __future__ import annotations

import dataclasses

import fused_cases as cases
import jax.numpy as jnp
import numpy as np
import pytest
from local_epilogue import local_epilogue

import stretto as st
from stretto.distributed.simulator import DeadlockError, SimulatorParams
from stretto.kernels.engine.hopper.applying import Applying
from stretto.kernels.engine.hopper.tile_config import TileConfig

M, N = 200, 272  # Two tiles down, and two across, of one block.
TILES = TileConfig(num_stages=2, store_buffers=2)
LONG = 9 * 64  # Nine stages, of which the third and the sixth bring a piece.


def with_residual(config: TileConfig, k: int, **settings):
    """The kernel's product and residual, and what they should be; in whole numbers."""
    x, w, r = (
        jnp.asarray(cases.whole_numbers(seed, *shape), jnp.bfloat16)
        for seed, shape in enumerate([(M, k), (k, N), (M, N)])
    )
    epilogue = st.epilogues.residual(r)
    with st.simulate(seed=3, core_count=1, **settings):
        found = local_epilogue(x, [w], epilogue, config=config, interpret=SimulatorParams())
        found = np.asarray(found, np.float32)
    expected = (x.astype(jnp.float32) @ w + r).astype(x.dtype)
    return found, np.asarray(expected, np.float32)


@pytest.fixture
def brought(monkeypatch) -> list:
    """Pieces that the loading warp is traced to load."""
    found, load = [], Applying._load_when_free

    def noted(self, tile, index):
        found.append(index)
        load(self, tile, index)

    monkeypatch.setattr(Applying, "_load_when_free", noted)
    return found


@pytest.mark.parametrize(
    ("buffers", "k", "paced"),
    [
        (2, LONG, True),
        pytest.param(4, 15 * 64, True, marks=pytest.mark.slow),
        pytest.param(2, 136, False, marks=pytest.mark.slow),  # Too few stages.
    ],
)
def test_a_long_contraction_brings_the_pieces_one_by_one(buffers, k, paced, brought):
    config = dataclasses.replace(TILES, store_buffers=buffers)
    np.testing.assert_array_equal(*with_residual(config, k))
    # One copy of the code for the buffers, and one for each piece that waits for a buffer.
    assert len(brought) == (1 + 4 - buffers if paced else 0)


def test_a_buffer_is_not_overwritten_before_it_is_stored(monkeypatch):
    monkeypatch.setattr(Applying, "_load_when_free", Applying.load_piece)
    with pytest.raises(DeadlockError, match="race on out_smem"):
        with_residual(TILES, LONG, on_finding="record")
