"""The collectives, which have no products, simulated as on a B200."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from collective_checks import drawn, per_device, same_bits

import stretto as st

X = drawn((3, 24, 128), jnp.bfloat16)
SUM = X.astype(np.float32).sum(0).astype(X.dtype)
CALLS = {
    "all_gather": (st.all_gather, [X.reshape(-1, 128)] * 3),
    "reduce_scatter": (st.reduce_scatter, SUM.reshape(3, 8, 128)),
    "all_reduce": (st.all_reduce, [SUM] * 3),
    "all_to_all": (
        functools.partial(st.all_to_all, split_axis=0, concat_axis=0),
        X.reshape(3, 3, 8, 128).swapaxes(0, 1).reshape(X.shape),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_collectives(name):
    call, want = CALLS[name]
    with st.simulate(target="b200", core_count=3) as report:
        got = per_device(functools.partial(call, axis_name="x", backend="pallas"), X)
    assert report.launches and report.ok, str(report)
    same_bits(got, np.stack(want))
