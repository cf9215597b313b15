"""Arrays in the memory of a CPU program, small types included."""

from __future__ import annotations

import ctypes

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import stretto as st
from stretto.distributed.private_jax.host_arrays import HostArray

VALUES = [1, 0, 1, 1, 0, 1, 1]


@pytest.mark.parametrize(
    ("dtype", "memory"),
    [
        (jnp.int4, b"\x01\x11\x10\x01"),
        (jnp.uint2, b"\x51\x14"),
        (jnp.float4_e2m1fn, b"\x02\x22\x20\x02"),
        (jnp.bool_, bytes(VALUES)),
        (jnp.int8, bytes(VALUES)),
    ],
)
def test_memory(dtype, memory):
    place, value = HostArray((7,), np.dtype(dtype)), np.array(VALUES, dtype)
    room = (ctypes.c_uint8 * len(memory))()
    place.write(ctypes.addressof(room), value)
    assert bytes(room) == memory
    read = place.read(ctypes.addressof(room))
    assert read.dtype == value.dtype
    np.testing.assert_array_equal(read, value)


def test_negative_numbers_of_four_bits():
    place, value = HostArray((2, 8), np.dtype(jnp.int4)), np.arange(-8, 8).reshape(2, 8)
    room = (ctypes.c_uint8 * 8)()
    place.write(ctypes.addressof(room), value.astype(jnp.int4))
    np.testing.assert_array_equal(place.read(ctypes.addressof(room)).astype(int), value)


@pytest.mark.parametrize("value", [np.float32(1.5), np.array(1.5, np.float32)])
def test_a_single_value_has_no_axis(value):
    place = HostArray((), np.dtype(np.float32))
    room = (ctypes.c_float * 1)()
    place.write(ctypes.addressof(room), value)
    assert room[0] == 1.5
    assert place.read(ctypes.addressof(room)).shape == ()


def test_columns_are_written_as_rows():
    value = np.arange(6, dtype=np.float32).reshape(2, 3).T
    room = (ctypes.c_float * 6)()
    HostArray((3, 2), value.dtype).write(ctypes.addressof(room), value)
    assert list(room) == [0, 3, 1, 4, 2, 5]


def test_an_empty_array_needs_no_memory():
    place = HostArray((0, 4), np.dtype(np.float32))
    place.write(0, np.zeros((0, 4), np.float32))
    assert place.read(0).shape == (0, 4)


@pytest.mark.parametrize("value", [np.zeros(3, np.float32), np.zeros((1, 2), np.float64)])
def test_what_does_not_fit_is_refused(value):
    with pytest.raises(ValueError, match=r"where the program expects \(1, 2\) and float32"):
        HostArray((1, 2), np.dtype(np.float32)).write(0, value)


@pytest.mark.parametrize(
    "dtype", [jnp.int4, jnp.bool_, jnp.bfloat16, jnp.float8_e4m3fn, jnp.uint16]
)
def test_operands_and_results_of_a_kernel(dtype):
    def copy(x_ref, out_ref):
        out_ref[...] = x_ref[...]

    x = jnp.asarray(np.arange(128) % 2, dtype)
    with st.simulate():
        out = plgpu.kernel(copy, out_type=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)
    np.testing.assert_array_equal(np.asarray(out), np.asarray(x))
