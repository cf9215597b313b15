"""Device code with an equivalent in numpy, in the simulator; attention's kernel has it compiled."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import stretto as st
from stretto.distributed import kernel
from stretto.distributed.primitives.device_code import any_above, settled

SHAPE = 64, 8


def body(x_ref, above_ref, same_ref):
    x = plgpu.load(x_ref, layout=plgpu.Layout.WGMMA, optimized=False)
    above_ref[...] = jnp.where(any_above(x, 2.0), x + 1.0, x)
    same_ref[...] = settled(x.astype(jnp.bfloat16))


@pytest.mark.parametrize(("highest", "is_above"), [(1.0, 0), (2.0, 0), (3.0, 1), (np.nan, 1)])
def test_a_vote_and_what_is_settled(highest, is_above):
    x = np.zeros(SHAPE, np.float32)
    x[5, 3] = highest
    types = [jax.ShapeDtypeStruct(SHAPE, dtype) for dtype in (jnp.float32, jnp.bfloat16)]

    @jax.jit
    def program(x):
        return kernel.launch(body, x, name="voting", team=None, out_type=types, num_blocks=1)

    with st.simulate(core_count=1) as report:
        above, same = program(x)
    assert report.ok, str(report)
    np.testing.assert_array_equal(above, x + is_above)
    np.testing.assert_array_equal(np.asarray(same, np.float32), x)
