"""Copies that reach over an edge: cut off, but where Mosaic GPU does not."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed.simulator import KernelFaultError, simulate

F32, BF16 = jnp.float32, jnp.bfloat16
TILED = (plgpu.TilingTransform((8, 64)),)
SWIZZLED = (*TILED, plgpu.SwizzleTransform(128))


def store(out_shape, piece, window, *, dtype=F32, transforms=(), blocks=1, reduction=None):
    """Each block, `i`, stores ones to `window(out_ref, i)` of zeros; returns (out, report)."""

    def body(out_ref, smem):
        smem[...] = jnp.ones(piece, dtype)
        plgpu.commit_smem()
        window_ref = window(out_ref, lax.axis_index("block"))
        plgpu.copy_smem_to_gmem(smem, window_ref, reduction_op=reduction)
        plgpu.wait_smem_to_gmem(0)

    ref = jax.new_ref(jnp.zeros(out_shape, dtype))
    with simulate(on_finding="record") as report:
        plgpu.kernel(
            body,
            out_type=(),
            scratch_types=[plgpu.SMEM(piece, dtype, transforms=transforms)],
            grid=(blocks,),
            grid_names=("block",),
        )(ref)
        out = jax.block_until_ready(ref[...])
    return np.asarray(out, np.float32), report


def part(rows, columns, first=1):
    """Rows and columns of a matrix, from the `first` piece on."""

    def window(out_ref, i):
        return out_ref.at[0].at[pl.ds((i + first) * rows, rows), pl.ds(i * columns, columns)]

    return window


def test_a_contiguous_window_runs_on():
    """Its 8 rows begin 4 before the end of the first of two matrices."""
    out, report = store((2, 12, 128), (8, 128), part(8, 128))
    np.testing.assert_array_equal(out[0, 8:], 1)
    np.testing.assert_array_equal(out[1, :4], 1)
    assert out.sum() == 8 * 128
    (found,) = report.findings
    assert found.kind == "stray copy"
    assert "takes 512 elements outside of its window, in elements 1024 to 2047 of" in str(found)
    assert "copy_smem_to_gmem(smem, window_ref, reduction_op=reduction)" in str(found)


def test_up_to_the_end_of_the_array_and_no_further():
    out, report = store((1, 12, 128), (8, 128), part(8, 128))
    assert report.ok and out.sum() == 4 * 128


def test_who_writes_what_comes_after_has_a_race():
    def window(out_ref, i):
        return out_ref.at[i].at[pl.ds(8 * (1 - i), 8)]  # Of 12 rows; the second matrix's first 8.

    out, report = store((2, 12, 128), (8, 128), window, blocks=2)
    assert report.kinds() == {"race", "stray copy"} and out.sum() == 12 * 128


@pytest.mark.parametrize(
    ("piece", "options"),
    [
        ((8, 64), dict()),
        ((8, 256), dict()),
        ((8, 128), dict(reduction="add")),
        ((8, 64), dict(transforms=SWIZZLED, dtype=BF16)),
        ((8, 64), dict(transforms=TILED, dtype=BF16)),
    ],
)
def test_others_are_cut_off(piece, options):
    out, report = store((2, 12, 128), piece, part(*piece), **options)
    assert report.ok, str(report)
    assert out.sum() == 4 * min(piece[1], 128)


def test_a_tile_as_wide_as_the_array_runs_on_unless_it_is_swizzled():
    _, report = store((2, 12, 64), (8, 64), part(8, 64), transforms=TILED, dtype=BF16)
    assert report.kinds() == {"stray copy"}
    _, report = store((2, 12, 64), (8, 64), part(8, 64), transforms=SWIZZLED, dtype=BF16)
    assert report.ok, str(report)


@pytest.mark.parametrize("transforms", [(), SWIZZLED])
def test_an_index_along_a_dimension_of_one_tile_is_ignored(transforms):
    """What lies past the only row, or the only tile of rows, lands in it."""
    rows = 8 if transforms else 1
    options = dict(transforms=transforms, dtype=BF16)
    out, report = store((2, rows, 128), (rows, 64), part(rows, 64), **options)
    assert out[0].sum() == rows * 64 and not out[1].any()
    assert report.kinds() == {"stray copy"}


def test_an_index_along_a_dimension_of_two_tiles_is_not():
    window = part(8, 64, first=2)
    out, report = store((2, 16, 128), (8, 64), window, transforms=SWIZZLED, dtype=BF16)
    assert report.ok and not out.any()


def load(mode):
    def body(x_ref, out_ref, smem, landed):
        start = lax.axis_index("block") * 0 + 8
        window = x_ref.at[0].at[pl.ds(start, 8)]
        plgpu.copy_gmem_to_smem(window, smem, landed, oob_mode=mode)
        plgpu.barrier_wait(landed)
        out_ref[...] = smem[...]

    with simulate(on_finding="record") as report:
        out = plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct((8, 128), F32),
            scratch_types=[plgpu.SMEM((8, 128), F32), plgpu.Barrier()],
            grid=(1,),
            grid_names=("block",),
        )(np.ones((2, 12, 128), np.float32))
        return np.asarray(out), report


def test_a_load_is_filled_up_with_zeros():
    out, report = load(None)
    assert report.ok and (out[:4] == 1).all() and not out[4:].any()


def test_a_load_that_breaks_its_promise():
    with pytest.raises(KernelFaultError, match="PROMISE_IN_BOUNDS reaches over an edge"):
        load(plgpu.OOBFillMode.PROMISE_IN_BOUNDS)
