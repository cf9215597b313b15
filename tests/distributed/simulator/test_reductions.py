"""Bulk copies that reduce: in every type that the hardware takes, and refused in the others."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed.simulator import UnsupportedKernelError, simulate

THERE = [0, 1, 5, 7, 2**31 - 1, 2**31, 2**32 - 1, 3]
VALUE = [7, 1, 4, 7, 2**31, 1, 2**31, 2**32 - 2]


def reduce_into(there, value, reduction):
    """What a copy of `value` with `reduction` leaves in global memory that held `there`."""

    def body(there_ref, value_ref, out_ref, smem):
        out_ref[...] = there_ref[...]
        smem[...] = value_ref[...]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem, out_ref, reduction_op=reduction)
        plgpu.wait_smem_to_gmem(0)

    scratch = [plgpu.SMEM(value.shape, value.dtype)]
    with simulate() as report:
        kernel = plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct(value.shape, value.dtype),
            scratch_types=scratch,
        )
        out = np.asarray(kernel(there, value))
    assert report.ok, str(report)
    return out


@pytest.mark.parametrize("dtype", [np.int32, np.uint32])
@pytest.mark.parametrize("reduction", ["add", "umin", "umax", "smin", "smax", "and", "or", "xor"])
def test_integers(reduction, dtype):
    """The reduction says whether bits are read as signed; the array's type does not."""
    there, value = (np.array(v, np.uint32) for v in (THERE, VALUE))
    read = np.int32 if reduction.startswith("s") else np.uint32
    name = {"umin": "minimum", "smin": "minimum", "umax": "maximum", "smax": "maximum"}
    bitwise = {"and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor"}
    function = getattr(np, {**name, **bitwise}.get(reduction, reduction))
    want = function(there.view(read), value.view(read)).view(dtype)
    got = reduce_into(there.view(dtype), value.view(dtype), reduction)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("reduction", "want"),
    [("inc", [1, 0, 0, 0, 2**31, 0, 0, 4]), ("dec", [7, 0, 4, 6, 2**31 - 2, 1, 2**31, 2])],
)
@pytest.mark.parametrize("dtype", [np.int32, np.uint32])
def test_counters(reduction, want, dtype):
    """They count up to a limit and down from it, unsigned."""
    there, value = (np.array(v, np.uint32).view(dtype) for v in (THERE, VALUE))
    np.testing.assert_array_equal(
        reduce_into(there, value, reduction), np.array(want, np.uint32).view(dtype)
    )


@pytest.mark.parametrize(
    ("reduction", "dtype", "hint"),
    [
        ("min", "int32", "take 'smin' or 'umin'"),
        ("max", "float32", "bfloat16, float16"),
        ("smin", "float16", "int32"),
        ("add", "int8", "float32"),
        ("inc", "int64", "int32"),
        ("xor", "float32", "uint32"),
    ],
)
def test_refused_as_on_the_device(reduction, dtype, hint):
    with jax.enable_x64(True), pytest.raises(UnsupportedKernelError, match=hint) as error:
        reduce_into(np.ones(128, dtype), np.ones(128, dtype), reduction)
    assert "copy_smem_to_gmem" in str(error.value)


def test_zeros_of_either_sign():
    zeros = np.array([0.0, -0.0, 0.0, -0.0], jnp.bfloat16)
    got = reduce_into(zeros, zeros[::-1].copy(), "max")
    assert not np.signbit(got.astype(np.float32)).any()
