"""Shared memory: copies that land later, tensor cores that go on reading, and who must wait."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed.simulator import simulate

F32 = jnp.float32
SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


def run(body, *operands, out, scratch=(), on_finding="record", seed=0, **kernel):
    """Runs a kernel on one device; returns (result, report)."""
    with simulate(seed=seed, on_finding=on_finding) as report:
        result = plgpu.kernel(body, out_type=out, scratch_types=scratch, **kernel)(*operands)
        return jax.block_until_ready(result), report


def struct(*shape, dtype=F32):
    return jax.ShapeDtypeStruct(shape, dtype)


X = np.arange(8 * 128, dtype=np.float32).reshape(8, 128)


def copy_through(bug=None, seed=0):
    """Global to shared memory, plus one, and back."""

    def body(x_ref, out_ref, smem, landed):
        plgpu.copy_gmem_to_smem(x_ref, smem, landed)
        if bug != "read too early":
            plgpu.barrier_wait(landed)
        smem[...] = smem[...] + 1
        if bug != "no commit":
            plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem, out_ref)
        if bug == "write too early":
            smem[...] = smem[...] * 0
        plgpu.wait_smem_to_gmem(0)
        if bug == "read too early":
            plgpu.barrier_wait(landed)

    scratch = [plgpu.SMEM((8, 128), F32), plgpu.Barrier()]
    return run(body, X, out=struct(8, 128), scratch=scratch, seed=seed)


@pytest.mark.parametrize(
    ("bug", "kind", "names"),
    [
        ("read too early", "race", "copy_gmem_to_smem(x_ref, smem, landed)"),
        ("write too early", "race", "copy_smem_to_gmem(smem, out_ref)"),
        ("no commit", "uncommitted store", "smem[...] = smem[...] + 1"),
    ],
)
def test_copy_bugs(bug, kind, names):
    for seed in range(10):
        _, report = copy_through(bug, seed)
        assert [f for f in report.findings if f.kind == kind and names in str(f)], str(report)


def test_copy_through_is_clean():
    for seed in range(10):
        out, report = copy_through(seed=seed)
        assert report.ok and not report.warnings, str(report)
        np.testing.assert_array_equal(out, X + 1)
    assert report.statistics.peak_shared_bytes == 8 * 128 * 4 + 8
    assert report.statistics.copies == 2
    assert report.statistics.copy_bytes == 2 * X.nbytes


@pytest.mark.parametrize("waits", [True, False])
def test_wgmma_reads_until_it_is_waited_for(waits):
    def body(a_ref, b_ref, out_ref, a, b, landed, loaded_again):
        plgpu.copy_gmem_to_smem(a_ref, a, landed)
        plgpu.copy_gmem_to_smem(b_ref, b, landed)
        plgpu.barrier_wait(landed)

        def multiply(acc):
            plgpu.wgmma(acc, a, b)
            if waits:
                plgpu.wgmma_wait(0)
            plgpu.copy_gmem_to_smem(b_ref, a, loaded_again)
            return acc[...]

        out_ref[...] = pl.run_scoped(multiply, plgpu.ACC((64, 64), F32))
        plgpu.barrier_wait(loaded_again)

    a = jax.random.normal(jax.random.key(0), (64, 64), jnp.bfloat16)
    b = jax.random.normal(jax.random.key(1), (64, 64), jnp.bfloat16)
    tile = plgpu.SMEM((64, 64), jnp.bfloat16, transforms=SWIZZLED)
    scratch = [tile, tile, plgpu.Barrier(num_arrivals=2), plgpu.Barrier()]
    out, report = run(body, a, b, out=struct(64, 64), scratch=scratch)
    want = np.asarray(a, np.float32) @ np.asarray(b, np.float32)
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-4)
    assert report.kinds() == (set() if waits else {"race"})
    if not waits:
        assert "wgmma's read" in str(report.findings[0])


def test_accumulator_of_run_state_starts_with_its_value():
    def body(a_ref, b_ref, out_ref, a, b, landed):
        plgpu.copy_gmem_to_smem(a_ref, a, landed)
        plgpu.copy_gmem_to_smem(b_ref, b, landed)
        plgpu.barrier_wait(landed)
        start = plgpu.ACC.init(jnp.full((64, 64), 3.0, F32))
        out_ref[...] = pl.run_state(lambda acc: plgpu.wgmma(acc, a, b))(start)

    eye = jnp.eye(64, dtype=jnp.float16)
    tile = plgpu.SMEM((64, 64), jnp.float16, transforms=SWIZZLED)
    scratch = [tile, tile, plgpu.Barrier(num_arrivals=2)]
    out, report = run(body, eye, eye, out=struct(64, 64), scratch=scratch)
    assert report.ok, str(report)
    np.testing.assert_array_equal(out, np.eye(64) + 3)


def test_copies_past_the_edge():
    """Reads past the edge give zeros; writes past it are dropped."""

    def body(x_ref, out_ref, smem, landed):
        start = lax.axis_index("block") * 8
        plgpu.copy_gmem_to_smem(x_ref.at[pl.ds(start, 8)], smem, landed)
        plgpu.barrier_wait(landed)
        smem[...] = smem[...] + 1
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem, out_ref.at[pl.ds(start, 8)])
        plgpu.wait_smem_to_gmem(0)

    x = np.ones((13, 128), np.float32)
    scratch = [plgpu.SMEM((8, 128), F32), plgpu.Barrier()]
    out, report = run(
        body, x, out=struct(13, 128), scratch=scratch, grid=(2,), grid_names=("block",)
    )
    assert report.ok, str(report)
    np.testing.assert_array_equal(out, x + 1)


def test_predicated_copy_moves_nothing_when_false():
    def body(x_ref, out_ref, smem, landed):
        even = lax.axis_index("block") % 2 == 0
        plgpu.copy_gmem_to_smem(x_ref, smem, landed)
        plgpu.barrier_wait(landed)
        plgpu.copy_gmem_to_smem(x_ref, smem, landed, predicate=False)
        plgpu.barrier_wait(landed)  # It arrives all the same.
        plgpu.copy_smem_to_gmem(smem, out_ref.at[lax.axis_index("block")], predicate=even)
        plgpu.wait_smem_to_gmem(0)

    scratch = [plgpu.SMEM((8, 128), F32), plgpu.Barrier()]
    out, report = run(
        body, X, out=struct(2, 8, 128), scratch=scratch, grid=(2,), grid_names=("block",)
    )
    assert report.ok, str(report)
    np.testing.assert_array_equal(out[0], X)
    assert np.isnan(out[1]).all()


def test_refs_of_a_union_share_memory():
    def body(x_ref, out_ref, union, landed):
        [as_floats], [as_bytes] = union
        plgpu.copy_gmem_to_smem(x_ref, as_floats, landed)
        plgpu.barrier_wait(landed)
        out_ref[...] = as_bytes[...].astype(jnp.int32)

    x = np.arange(32 * 4, dtype=np.float32).reshape(32, 4)
    union = plgpu.RefUnion([plgpu.SMEM((32, 4), F32)], [plgpu.SMEM((512,), jnp.int8)])
    out, report = run(body, x, out=struct(512, dtype=jnp.int32), scratch=[union, plgpu.Barrier()])
    assert report.ok, str(report)
    np.testing.assert_array_equal(out, x.reshape(-1).view(np.int8))


@pytest.mark.parametrize("back", [False, True], ids=["rows to tiles", "tiles to rows"])
def test_tiles_decide_which_bytes_refs_of_a_union_share(back):
    """Two 8 x 32 tiles side by side of one ref are rows 0 to 8 and 8 to 16 of the other."""

    def body(x_ref, out_ref, union, landed):
        wide, narrow = union
        source, target = (wide, narrow) if back else (narrow, wide)
        plgpu.copy_gmem_to_smem(x_ref, source, landed)
        plgpu.barrier_wait(landed)
        plgpu.copy_smem_to_gmem(target, out_ref)
        plgpu.wait_smem_to_gmem(0)

    rows = np.arange(16 * 32, dtype=np.float32).reshape(16, 32)
    wide = np.concatenate([rows[:8], rows[8:]], axis=1)
    layout = plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128)
    union = plgpu.RefUnion(
        plgpu.SMEM((8, 64), F32, transforms=layout),
        plgpu.SMEM((16, 32), F32, transforms=layout[1:]),
    )
    given, wanted = (wide, rows) if back else (rows, wide)
    out, report = run(body, given, out=struct(*wanted.shape), scratch=[union, plgpu.Barrier()])
    assert report.ok, str(report)
    np.testing.assert_array_equal(out, wanted)


@pytest.mark.parametrize("ordered", [True, False])
def test_warps_of_a_warpgroup(ordered):
    """One warp fetches, another stores what it fetched."""

    def body(x_ref, out_ref, smem, landed):
        @pl.core_map(plgpu.WarpMesh(axis_name="warp"))
        def _():
            warp = lax.axis_index("warp")

            @pl.when(warp == 0)
            def _():
                plgpu.copy_gmem_to_smem(x_ref, smem, landed)

            @pl.when(warp == 2)
            def _():
                if ordered:
                    plgpu.barrier_wait(landed)
                plgpu.copy_smem_to_gmem(smem, out_ref)

        plgpu.wait_smem_to_gmem(0)
        if not ordered:
            plgpu.barrier_wait(landed)

    scratch = [plgpu.SMEM((8, 128), F32), plgpu.Barrier()]
    out, report = run(body, X, out=struct(8, 128), scratch=scratch)
    if ordered:
        assert report.ok, str(report)
        np.testing.assert_array_equal(out, X)
    else:
        assert report.kinds() >= {"race"}
        assert "warp 2" in str(report)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_emit_pipeline(steps):
    def body(x_ref, out_ref):
        spec = plgpu.BlockSpec((8, 128), lambda i: (i, 0))

        def double(_, x_smem, out_smem):
            out_smem[...] = x_smem[...] * 2

        plgpu.emit_pipeline(
            double, grid=(4,), in_specs=[spec], out_specs=[spec], max_concurrent_steps=steps
        )(x_ref, out_ref)

    x = np.arange(32 * 128, dtype=np.float32).reshape(32, 128)
    out, report = run(body, x, out=struct(32, 128), seed=steps)
    assert report.ok, str(report)
    np.testing.assert_array_equal(out, x * 2)


def test_slices_are_exact():
    """Interleaved, empty and neighbouring slices of two warpgroups are no race."""

    def body(x_ref, out_ref):
        wg = lax.axis_index("wg")
        for row in range(8):

            @pl.when(wg == row % 2)
            def _(row=row):
                out_ref[row] = x_ref[row] + 1

    out, report = run(body, X, out=struct(8, 128), num_threads=2, thread_name="wg")
    assert report.ok, str(report)
    np.testing.assert_array_equal(out, X + 1)


def test_overlapping_slices_race():
    def body(x_ref, out_ref):
        start = lax.axis_index("wg") * 63
        out_ref[pl.ds(start, 64)] = x_ref[pl.ds(start, 64)]

    x = np.zeros(128, np.float32)
    _, report = run(body, x, out=struct(128), num_threads=2, thread_name="wg")
    assert report.kinds() == {"race"}
    assert "out_ref[pl.ds(start, 64)]" in str(report.findings[0])


def test_unwritten_memory_is_reported():
    def body(x_ref, out_ref, smem):
        smem[pl.ds(0, 4)] = x_ref[pl.ds(0, 4)]
        out_ref[...] = smem[...]

    out, report = run(body, X, out=struct(8, 128), scratch=[plgpu.SMEM((8, 128), F32)])
    assert report.kinds() == {"uninitialised"}
    assert "out_ref[...] = smem[...]" in str(report.findings[0])
    assert np.isnan(out[4:]).all() and not np.isnan(out[:4]).any()


@pytest.mark.parametrize("how", ["copy", "atomic"])
@pytest.mark.parametrize("written", [0, 4, 8])
def test_adding_to_unwritten_memory_is_reported(how, written):
    def body(x_ref, out_ref, smem):
        out_ref[pl.ds(0, written)] = x_ref[pl.ds(0, written)]
        if how == "atomic":
            plgpu.atomic_add(out_ref, x_ref[...])
            return
        smem[...] = x_ref[...]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem, out_ref, reduction_op="add")
        plgpu.wait_smem_to_gmem(0)

    out, report = run(body, X, out=struct(8, 128), scratch=[plgpu.SMEM((8, 128), F32)])
    assert report.kinds() == (set() if written == 8 else {"uninitialised"}), str(report)
    np.testing.assert_array_equal(out[:written], 2 * X[:written])


@functools.cache
def _poison(dtype):
    def body(x_ref, out_ref, smem):
        out_ref[...] = smem[...]

    return run(body, X, out=struct(8, dtype=dtype), scratch=[plgpu.SMEM((8,), dtype)])[0]


def test_poison_stands_out():
    assert (np.asarray(_poison(jnp.int32)) == np.int32(np.uint32(0xA5A5A5A5).view(np.int32))).all()
    assert np.isnan(np.asarray(_poison(jnp.bfloat16), np.float32)).all()
