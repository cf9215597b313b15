"""Device code with an equivalent in numpy, in the simulator; kernels have it compiled."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

import stretto as st
from stretto.distributed import kernel
from stretto.distributed.primitives import warpgroup_tables
from stretto.distributed.primitives.device_code import any_above, settled
from stretto.distributed.simulator import SimulationError

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


VALUES, NUMBERS = 130, 256


def tables_body(x_ref, table_ref, found_ref, looked_up_ref, *, scratch, share):
    """Of every warpgroup; in shared memory of its own, or in that of the first one."""
    warpgroup = lax.axis_index(kernel.THREAD_AXIS)
    mine = scratch.at[0 if share else warpgroup]
    x, table = (
        plgpu.load(ref, layout=plgpu.Layout.WG_STRIDED((NUMBERS,), 1), optimized=False)
        for ref in (x_ref, table_ref)
    )
    found_ref[warpgroup] = warpgroup_tables.ranks_and_counts(x, VALUES, mine)
    looked_up_ref[warpgroup] = warpgroup_tables.looked_up(table, x, mine)


def tables_of(x, table, *, share=False):
    room = warpgroup_tables.room_of(VALUES)
    sizes = NUMBERS + room, NUMBERS
    scratch = plgpu.SMEM((2, warpgroup_tables.WORDS * room), jnp.int32)

    def body(*refs, **scratch_refs):
        tables_body(*refs, **scratch_refs, share=share)

    @jax.jit
    def program(x, table):
        return kernel.launch(
            body,
            x,
            table,
            name="tables",
            team=None,
            out_type=[jax.ShapeDtypeStruct((2, size), jnp.int32) for size in sizes],
            num_blocks=1,
            num_threads=2,
            scratch=dict(scratch=scratch),
        )

    return program(jnp.asarray(x, jnp.int32), jnp.asarray(table, jnp.int32))


def test_tables_of_a_warpgroup():
    draw = np.random.default_rng(0)
    x, table = draw.integers(-2, VALUES + 3, NUMBERS), draw.integers(0, 1000, NUMBERS)
    with st.simulate(core_count=1) as report:
        found, looked_up = map(np.asarray, tables_of(x, table))
    assert report.ok, str(report)
    valid = (x >= 0) & (x < VALUES)
    ranks = [(x[:i] == x[i]).sum() if valid[i] else 0 for i in range(NUMBERS)]
    counts = [(x == value).sum() for value in range(VALUES)]
    np.testing.assert_array_equal(found[:, :NUMBERS], [ranks] * 2)
    np.testing.assert_array_equal(found[:, NUMBERS:][:, :VALUES], [counts] * 2)
    assert not found[:, NUMBERS + VALUES :].any()
    np.testing.assert_array_equal(looked_up, [table[np.where(x < 0, -1, x)]] * 2)


def test_scratch_of_two_warpgroups_is_found():
    x = np.zeros(NUMBERS)
    with pytest.raises(SimulationError, match="race"), st.simulate(core_count=1):
        jax.block_until_ready(tables_of(x, x, share=True))
