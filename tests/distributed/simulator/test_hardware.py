"""Kernels that no H100 runs: they ask for too much, do not compile, or copy from odd places."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed.simulator import DeadlockError, FindingError, simulate

F32 = jnp.float32
SMEM, BARRIER = plgpu.SMEM, plgpu.Barrier()


def run(body, x, *, out=None, scratch=(), on_finding="record", check_hardware=True, **kernel):
    """Runs a kernel on one device; returns its report."""
    struct = jax.ShapeDtypeStruct(x.shape if out is None else out, x.dtype)
    with simulate(on_finding=on_finding, check_hardware=check_hardware) as report:
        result = plgpu.kernel(body, out_type=struct, scratch_types=scratch, **kernel)(x)
        jax.block_until_ready(result)
    return report


def told(report, kind):
    """The one finding of `kind`; the only one there is, but for those of an odd copy's place."""
    (finding,) = [f for f in report.findings if f.kind == kind]
    assert report.kinds() <= {kind, "misaligned copy"}, str(report)
    return str(finding)


def idle(x_ref, out_ref, *scratch):
    """Does nothing."""


ONE_BLOCK = dict(grid=(1,), grid_names=("block",))
WARPGROUP = dict(num_threads=1, thread_name="wg")
X = np.arange(128, dtype=np.float32)


# --- Limits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("too_much", "scratch", "said"),
    [
        (dict(num_threads=9), [], ["num_threads=9", "1152 threads", "at most 8"]),
        (dict(cluster=(4, 8), cluster_names=("c", "d")), [], ["cluster=(4, 8) is 32 blocks", "16"]),
        ({}, [plgpu.Barrier(num_barriers=33)], ["33 barriers", "at most 32"]),
        ({}, [plgpu.Barrier(num_barriers=(5, 8))], ["40 barriers"]),
        ({}, [plgpu.ClusterBarrier(collective_axes=(), num_barriers=40)], ["40 barriers"]),
        ({}, [plgpu.Barrier(num_arrivals=8192)], ["num_arrivals=8192", "1048576 of threads"]),
        ({}, [SMEM((320, 256), F32)], ["needs 327680 bytes", "232448", "320x256 float32"]),
        ({}, [SMEM((227 * 256,), F32), BARRIER], ["needs 232456 bytes"]),
        # Two buffers of a byte more than a KB each take two KB each.
        ({}, [SMEM((223 * 1024 + 1,), jnp.int8), SMEM((4 * 1024,), jnp.int8)], ["needs 233472"]),
    ],
)
def test_asks_for_too_much(too_much, scratch, said):
    kernel = ONE_BLOCK | WARPGROUP | too_much
    text = told(run(idle, X, scratch=scratch, **kernel), "hardware limit")
    assert "kernel idle: " in text and "def idle(x_ref, out_ref, *scratch)" in text
    assert all(part in text for part in said), text


@pytest.mark.compiles
@pytest.mark.parametrize(
    ("just_enough", "scratch"),
    [
        (dict(num_threads=8), []),
        (dict(cluster=(2, 8), cluster_names=("c", "d")), []),
        ({}, [plgpu.Barrier(num_barriers=(4, 8))] * 3),
        ({}, [plgpu.Barrier(num_arrivals=8191)]),
        ({}, [plgpu.Barrier(num_arrivals=8192, orders_tensor_core=True)]),
        ({}, [SMEM((227 * 256,), F32)]),
        ({}, [SMEM((226 * 256,), F32), *[BARRIER] * 3]),
        ({}, [SMEM((222 * 1024 + 1,), jnp.int8), SMEM((4 * 1024,), jnp.int8)]),
        ({}, [SMEM((226 * 512,), jnp.bfloat16), SMEM((2048,), jnp.int4)]),
    ],
)
def test_what_there_is_may_be_asked_for(just_enough, scratch):
    """Here and by JAX's own lowering, which is asked as well."""
    assert run(idle, X, scratch=scratch, **ONE_BLOCK | WARPGROUP | just_enough).ok


@pytest.mark.parametrize(("kilobytes", "fits"), [(100, True), (127, True), (128, False)])
def test_shared_memory_of_scopes_within_each_other(kilobytes, fits):
    """The larger of two scopes, one after the other, and all those around it."""

    def body(x_ref, out_ref, outer):
        def copy(inner):
            out_ref[...] = x_ref[...]

        def around(_, barrier):
            pl.run_scoped(copy, SMEM((10, 1024), jnp.int8))
            pl.run_scoped(copy, SMEM((kilobytes, 1024), jnp.int8))  # The larger one.

        pl.run_scoped(around, SMEM((49, 1024), jnp.int8), plgpu.Barrier(num_barriers=2))

    report = run(body, X, scratch=[SMEM((50, 1024), jnp.int8)])
    if fits:
        assert report.ok, str(report)
        return
    text = told(report, "hardware limit")
    assert f"needs {227 * 1024 + 16} bytes" in text and "# The larger one." in text
    assert f"inner ({kilobytes}x1024 int8) {kilobytes * 1024}" in text


@pytest.mark.parametrize(("count", "fits"), [(16, False), (24, True), (256, True), (264, False)])
def test_registers_of_a_thread(count, fits):
    def body(x_ref, out_ref):
        plgpu.set_max_registers(count, action="increase")
        out_ref[...] = x_ref[...]

    report = run(body, X)
    assert report.ok == fits
    if not fits:
        text = told(report, "hardware limit")
        assert f"set_max_registers({count})" in text and "increase" in text


# What a block starts with: 168 a thread of three warpgroups, and 128 of four.
@pytest.mark.parametrize(
    ("counts", "too_few"),
    [
        ((232, 232, 40), None),
        ((216, 216, 80), 64512),  # No more than a multiprocessor has, and more than the block.
        ((168, 176, None), 64512),
        ((152, 152, 152, 56), None),
        ((152, 152, 152, 64), 65536),
    ],
)
def test_registers_of_a_block(counts, too_few):
    def body(x_ref, out_ref):
        for wg, count in enumerate(counts):
            if count is not None:

                @pl.when(lax.axis_index("wg") == wg)
                def _(count=count):
                    plgpu.set_max_registers(count, action="increase" if count > 100 else "decrease")

    kernel = dict(num_threads=len(counts), thread_name="wg")
    assert run(body, X, check_hardware=False, **kernel).ok
    if too_few is None:
        assert run(body, X, **kernel).ok
        return
    with pytest.raises(DeadlockError, match=rf"waits for set_max_registers.* {too_few} in all"):
        run(body, X, **kernel)


def test_what_is_wrong_fails_the_run_unless_nobody_asks():
    kernel = dict(scratch=[plgpu.Barrier(num_barriers=40)], **ONE_BLOCK, **WARPGROUP)
    with pytest.raises(FindingError, match="40 barriers"):
        run(idle, X, on_finding="raise", **kernel)
    assert run(idle, X, on_finding="raise", check_hardware=False, **kernel).ok


# --- Places ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("columns", "fits"), [(32, True), (16, False), (8, False)])
@pytest.mark.parametrize("loads", [True, False])
def test_a_part_of_shared_memory_begins_at_a_multiple_of_128_bytes(columns, fits, loads):
    def body(x_ref, out_ref, smem, landed):
        row = 1 + lax.axis_index("block") * 0  # Known when the kernel runs.
        if loads:
            plgpu.copy_gmem_to_smem(x_ref.at[row], smem.at[row], landed)
            plgpu.barrier_wait(landed)
        else:  # To a column of windows, which is not contiguous.
            smem[...] = jnp.zeros_like(smem)
            plgpu.commit_smem()
            window = out_ref.at[pl.ds(0, 1), pl.ds(0, columns)]
            plgpu.copy_smem_to_gmem(smem.at[pl.ds(row, 1)], window, reduction_op="add")
            plgpu.wait_smem_to_gmem(0)

    x = np.zeros((4, columns), np.float32)
    scratch = [SMEM((4, columns), F32), BARRIER]
    report = run(body, x, scratch=scratch, **ONE_BLOCK)
    assert report.kinds() <= {"misaligned copy", "uninitialised"}, str(report)
    assert ("misaligned copy" in report.kinds()) == (not fits)
    if not fits:
        assert f"begins {4 * columns} bytes into smem" in str(report.findings)
        assert "multiple of 128" in str(report.findings) and "_copy_" not in str(report.findings)


@pytest.mark.parametrize(("start", "fits"), [(0, True), (4, True), (1, False), (2, False)])
def test_a_flat_store_begins_at_a_multiple_of_16_bytes(start, fits):
    def body(x_ref, out_ref, smem, landed):
        plgpu.copy_gmem_to_smem(x_ref, smem, landed)
        plgpu.barrier_wait(landed)
        first = start + lax.axis_index("block") * 0
        plgpu.copy_smem_to_gmem(smem.at[pl.ds(4, 64)], out_ref.at[pl.ds(first, 64)])
        plgpu.wait_smem_to_gmem(0)

    report = run(body, X, out=(128,), scratch=[SMEM((128,), F32), BARRIER], **ONE_BLOCK)
    assert report.ok == fits, str(report)
    if not fits:
        text = told(report, "misaligned copy")
        assert f"begins {4 * start} bytes into out_ref" in text and "multiple of 16" in text


@pytest.mark.parametrize("column", [0, 8, 4, 1])
@pytest.mark.parametrize("loads", [True, False], ids=["load", "store"])
def test_a_copy_by_a_descriptor_begins_at_a_multiple_of_16_bytes(column, loads):
    """At 8 bytes of 16 an H200 reported an illegal instruction."""

    def body(x_ref, out_ref, smem, landed):
        first = lax.axis_index("block") * 0
        there = pl.ds(first + column, 8)
        plgpu.copy_gmem_to_smem(x_ref.at[:, there if loads else pl.ds(first, 8)], smem, landed)
        plgpu.barrier_wait(landed)
        plgpu.copy_smem_to_gmem(smem, out_ref.at[:, pl.ds(first, 8) if loads else there])
        plgpu.wait_smem_to_gmem(0)

    x = np.zeros((8, 16), jnp.bfloat16)
    scratch = [SMEM((8, 8), jnp.bfloat16), BARRIER]
    report = run(body, x, out=(8, 16), scratch=scratch, **ONE_BLOCK)
    fits = column % 8 == 0
    assert report.ok == fits, str(report)
    if not fits:
        text = told(report, "misaligned copy")
        assert f"begins {2 * column} bytes into" in text and "multiple of 16" in text


# --- What JAX does not lower ----------------------------------------------------------------------


def through(x_ref, out_ref, smem, landed):
    plgpu.copy_gmem_to_smem(x_ref, smem, landed)  # There.
    plgpu.barrier_wait(landed)
    plgpu.copy_smem_to_gmem(smem, out_ref)
    plgpu.wait_smem_to_gmem(0)


def doubled(x_ref, out_ref, smem, landed):
    out_ref[...] = x_ref[...] * 2  # There.


def zeros(x_ref, out_ref, smem, landed):
    smem[...] = jnp.zeros_like(smem)  # There.


def chosen(x_ref, out_ref, smem, landed):
    out_ref[...] = jnp.where(lax.axis_index("block") == 0, 0.0, x_ref[...])  # There.


@pytest.mark.compiles
@pytest.mark.parametrize(
    ("body", "shape", "said"),
    [
        (through, (300, 128), ["<=256 elements along each dimension", "(300, 128)"]),
        (through, (512,), ["<=256", "(512,)"]),
        (through, (3,), ["divisible by 128, but got 96"]),
        (through, (4, 3), ["strides", "multiple of 16 bytes"]),
        (doubled, (8, 100), ["Failed to infer", "8x100 at"]),
        pytest.param(
            *(zeros, (3, 128), ["WGStridedFragLayout(shape=(3, 128)", "multiple of 256 elements"]),
            marks=pytest.mark.skipif(jax.__version_info__ >= (0, 12), reason="JAX 0.12 takes it"),
        ),
        (chosen, (8, 128), ["Implicit broadcast"]),
    ],
)
def test_what_does_not_compile_is_told_with_its_line(body, shape, said):
    x = np.zeros(shape, np.float32)
    report = run(body, x, scratch=[SMEM(shape, F32), BARRIER], **ONE_BLOCK)
    text = told(report, "does not compile")
    assert f"kernel {body.__name__} " in text and "# There." in text
    assert all(part in text for part in said), text
    assert run(body, x, scratch=[SMEM(shape, F32), BARRIER], check_hardware=False, **ONE_BLOCK).ok


@pytest.mark.compiles
@pytest.mark.parametrize(
    ("body", "shape"),
    [
        *itertools.product([through, doubled], [(128,), (256, 128), (3, 128), (5, 256)]),
        *[(through, (8, 100)), (through, (4,)), (zeros, (4, 128)), (doubled, (512,))],
    ],
)
def test_what_compiles_is_not_refused(body, shape):
    x = np.zeros(shape, np.float32)
    report = run(body, x, scratch=[SMEM(shape, F32), BARRIER], **ONE_BLOCK)
    assert report.ok, str(report)


@pytest.mark.compiles
def test_tiles_that_jax_chooses_may_be_copied():
    """A window 512 wide is copied in tiles: JAX tiles what the tensor cores read."""

    def body(a_ref, b_ref, out_ref, a, b, landed):
        plgpu.copy_gmem_to_smem(a_ref, a, landed)
        plgpu.copy_gmem_to_smem(b_ref, b, landed)
        plgpu.barrier_wait(landed)

        def multiply(acc):
            plgpu.wgmma(acc, a, b)
            return acc[...]

        out_ref[...] = pl.run_scoped(multiply, plgpu.ACC((64, 64), F32))

    shapes = [(64, 512), (512, 64)]
    operands = [jnp.ones(shape, jnp.bfloat16) for shape in shapes]
    with simulate() as report:
        scratch = [*(SMEM(shape, jnp.bfloat16) for shape in shapes), plgpu.Barrier(num_arrivals=2)]
        struct = jax.ShapeDtypeStruct((64, 64), F32)
        jax.block_until_ready(plgpu.kernel(body, out_type=struct, scratch_types=scratch)(*operands))
    assert report.ok, str(report)
