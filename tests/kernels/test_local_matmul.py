"""The shared matmul on one device, in the simulator."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from stretto.distributed import simulator
from stretto.kernels.engine.hopper.tile_config import TileConfig
from stretto.kernels.fused.local_matmul import local_matmul


def operands(m, k, n, dtype=jnp.bfloat16):
    rng = np.random.default_rng(m + k + n)
    lhs = rng.integers(-3, 4, (m, k)).astype(np.float32)
    rhs = rng.integers(-3, 4, (k, n)).astype(np.float32)
    return jnp.asarray(lhs, dtype), jnp.asarray(rhs, dtype), lhs @ rhs


@pytest.mark.parametrize("shape", [(256, 128, 256), (136, 64, 320)])
@pytest.mark.parametrize("config", [TileConfig(), TileConfig(tile_n=128, raster_width=1)])
def test_whole_numbers_are_exact(shape, config):
    lhs, rhs, expected = operands(*shape)
    out = local_matmul(
        lhs,
        rhs,
        out_dtype=jnp.float32,
        config=config,
        interpret=simulator.SimulatorParams(),
    )
    np.testing.assert_array_equal(np.asarray(out), expected)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((16, 68), (68, 64)), "k=68 must be a multiple of 8"),
        (((16, 64), (64, 68)), "n=68 must be a multiple of 8"),
        (((16, 64), (128, 64)), "k=64 columns and rhs k=128 rows"),
    ],
)
def test_operands_that_do_not_fit(shapes, message):
    lhs, rhs = (jnp.zeros(shape, jnp.bfloat16) for shape in shapes)
    with pytest.raises(ValueError, match=message):
        local_matmul(lhs, rhs)
