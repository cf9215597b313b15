"""Which stores are flat copies, which of them may run on, and that a kernel with one is refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
import window_cases
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from window_cases import CASES

from stretto.distributed import copies, kernel
from stretto.distributed.memory import edges

F32 = jnp.float32


@pytest.mark.parametrize("name", CASES)
def test_stores_of_a_kernel(name):
    case = CASES[name]
    jaxpr = jax.make_jaxpr(lambda: window_cases.call([case]))()
    assert [s.is_flat for s in edges.stores(jaxpr)] == [case.flat] * (case.reduction is None)
    if case.edge is None:
        edges.check_stores(jaxpr, "store")
        return
    with pytest.raises(ValueError, match=rf"kernel store: .* the edge of dimension {case.edge}, "):
        edges.check_stores(jaxpr, "store")


def trace(body, rows, **scratch):
    """Traces a kernel of two matrices of `rows` x 128, in one result."""

    def call(x):
        return kernel.launch(
            body, x, name="own", team=None, num_blocks=1,
            out_type=[jax.ShapeDtypeStruct((2, rows, 128), F32)], scratch=scratch,
        )  # fmt: skip

    return jax.eval_shape(call, jax.ShapeDtypeStruct((rows, 128), F32))


def copied_by_hand(rows):
    def body(x_ref, out_ref, *, piece):
        def step(i, _):
            plgpu.copy_smem_to_gmem(piece, out_ref.at[1, pl.ds(i * 8, 8)])

        lax.fori_loop(0, -(-rows // 8), step, None)

    trace(body, rows, piece=plgpu.SMEM((8, 128), F32))


def pushed(rows):
    def body(x_ref, out_ref, *, buffers, arrived):
        copies.Push(
            sources=[x_ref], destinations=[[out_ref.at[1]]], buffers=buffers, barriers=arrived,
            num_blocks=1,
        ).run(kernel.block_id())  # fmt: skip

    arrived = plgpu.Barrier(num_barriers=2)
    trace(body, rows, buffers=plgpu.SMEM((2, 8, 128), F32), arrived=arrived)


def pulled(rows, columns=128):
    def body(x_ref, out_ref, *, buffers, arrived):
        copies.Pull(
            pieces=-(-rows // 8), place=lambda i: copies.Place(0, i * 8, 0), sources=[x_ref],
            destination=lambda source: out_ref.at[1], buffers=buffers, barriers=arrived,
        ).run()  # fmt: skip

    arrived = plgpu.Barrier(num_barriers=2)
    trace(body, rows, buffers=plgpu.SMEM((2, 8, columns), F32), arrived=arrived)


@pytest.mark.parametrize("move", [copied_by_hand, pushed, pulled])
def test_a_launch_of_a_kernel_that_may_run_on_is_refused(move):
    move(16)
    with pytest.raises(
        ValueError,
        match=r"kernel own: a window of \(1, 8, 128\) is stored to an array of \(2, 20, 128\), at"
        r" .*copy_smem_to_gmem.* the edge of dimension 1, of 20 elements, but continues .*"
        r" Use windows whose size there divides 20, or narrower ones",
    ):
        move(20)


def test_pieces_that_are_not_contiguous_are_cut_off():
    pulled(20, columns=64)
