"""Cluster launch control: a block takes the place of one that has not started."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed.simulator import simulate

RESIDENT = 4


def claimed(seed, collective_axes):
    """What each of the blocks that start first has claimed, or -1; and the report."""

    def body(out_ref, answer, barrier):
        plgpu.try_cluster_cancel(answer, barrier, collective_axes=collective_axes)
        plgpu.barrier_wait(barrier)
        (block,), is_claimed = plgpu.query_cluster_cancel(answer, grid_names=("x",))

        @pl.when(lax.axis_index("wg") == 0)
        def _():
            out_ref[lax.axis_index("x")] = lax.select(is_claimed, block, jnp.int32(-1))

    with simulate(
        seed=seed, target="b200", resident_blocks=RESIDENT, on_finding="record"
    ) as report:
        out = plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct((RESIDENT,), jnp.int32),
            grid=(RESIDENT + 1,),
            grid_names=("x",),
            num_threads=2,
            thread_name="wg",
            scratch_types=[plgpu.TryClusterCancelResult(), plgpu.Barrier(num_arrivals=2)],
        )()
        out = np.sort(np.asarray(out))
    return out, report


@pytest.mark.parametrize("seed", range(3))
def test_one_block_claims_the_one_that_waits(seed):
    out, report = claimed(seed, "wg")
    np.testing.assert_array_equal(out, [-1] * (RESIDENT - 1) + [RESIDENT])
    assert report.ok, str(report)


def test_two_threads_that_ask_without_naming_their_axis_overwrite_an_answer():
    """As in JAX's `test_cluster_launch_control`: the documentation wants the axis named."""
    _, report = claimed(0, ())
    (race,) = [f.message for f in report.findings if f.kind == "race"]
    assert "race on answer" in race and race.count("plgpu.try_cluster_cancel(") == 2
