"""Elements below a byte: in shared memory, in unions with others, in copies."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed.simulator import simulate

X = (np.arange(256) % 16 - 8).astype(np.float32)


def run(body, scratch, x=X, out=None):
    with simulate(on_finding="record") as report:
        kernel = plgpu.kernel(
            body,
            out_type=out or jax.ShapeDtypeStruct(X.shape, X.dtype),
            scratch_types=scratch,
        )
        return np.asarray(kernel(x)), report


@pytest.mark.parametrize("count", [1, 2])
def test_union_of_small_elements_alone(count):
    """It has half a byte for each element, and that is enough."""

    def body(x_ref, out_ref, union):
        refs = union[0]
        for ref in refs:
            ref[...] = x_ref[...].astype(ref.dtype)
        out_ref[...] = sum(ref[...].astype(jnp.float32) for ref in refs)

    refs = [plgpu.SMEM(X.shape, jnp.int4)] * count
    out, report = run(body, [plgpu.RefUnion(refs)])
    assert report.ok, str(report)
    np.testing.assert_array_equal(out, count * X)
    # JAX lays the refs of a group at multiples of 1024 bytes.
    assert report.statistics.peak_shared_bytes == 1024 * (count - 1) + X.size // 2


def test_union_of_small_elements_and_others_in_turn():
    def body(x_ref, out_ref, union):
        (small, smaller), wide = union
        small[...] = x_ref[...].astype(jnp.int4)
        smaller[...] = (x_ref[...] + 8).astype(jnp.uint4)
        total = small[...].astype(jnp.float32) + smaller[...].astype(jnp.float32)
        wide[...] = total
        out_ref[...] = wide[...]

    small = (plgpu.SMEM(X.shape, jnp.int4), plgpu.SMEM(X.shape, jnp.uint4))
    out, report = run(body, [plgpu.RefUnion(small, plgpu.SMEM(X.shape, jnp.float32))])
    assert report.ok, str(report)
    np.testing.assert_array_equal(out, 2 * X + 8)


@pytest.mark.parametrize("dtype", ["int4", "uint4", "int2"])
def test_small_elements_share_bytes(dtype):
    """The first is in the lowest bits, as another ref of the union shows."""
    bits = int(dtype[-1])
    per_byte = 8 // bits

    def body(x_ref, out_ref, union):
        small, whole = union
        small[...] = x_ref[...].astype(jnp.int32).astype(dtype)
        small[pl.ds(4, 4)] = x_ref[pl.ds(8, 4)].astype(jnp.int32).astype(dtype)
        out_ref[...] = whole[...].astype(jnp.float32)

    refs = plgpu.SMEM(X.shape, dtype), plgpu.SMEM((X.size // per_byte,), jnp.uint8)
    out_type = jax.ShapeDtypeStruct((X.size // per_byte,), jnp.float32)
    out, report = run(body, [plgpu.RefUnion(*refs)], out=out_type)
    assert report.ok, str(report)
    stored = X.astype(np.int64) % (1 << bits)
    stored[4:8] = stored[8:12]
    weights = 1 << (bits * np.arange(per_byte))
    np.testing.assert_array_equal(out, stored.reshape(-1, per_byte) @ weights)


@pytest.mark.parametrize("waits", [True, False])
def test_refs_of_a_union_share_memory(waits):
    """A store through one, while a copy still reads through the other, is a race."""

    def body(x_ref, out_ref, copied_ref, union):
        small, wide = union
        small[...] = x_ref[...].astype(jnp.int4)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(small, copied_ref)
        if waits:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        wide[...] = x_ref[...]
        out_ref[...] = wide[...]
        plgpu.wait_smem_to_gmem(0)

    union = plgpu.RefUnion(plgpu.SMEM(X.shape, jnp.int4), plgpu.SMEM(X.shape, jnp.float32))
    out_type = [jax.ShapeDtypeStruct(X.shape, t) for t in (jnp.float32, jnp.int4)]
    with simulate(on_finding="record") as report:
        kernel = plgpu.kernel(body, out_type=out_type, scratch_types=[union])
        out, copied = kernel(X)
    np.testing.assert_array_equal(out, X)
    if waits:
        assert report.ok, str(report)
        np.testing.assert_array_equal(np.asarray(copied).astype(np.float32), X)
    else:
        assert report.kinds() == {"race"}, str(report)


def test_elements_that_share_no_byte_do_not_race():
    """Each warpgroup has its half of an array of half bytes, and of the union around it."""

    def body(x_ref, out_ref, union):
        (small,) = union[0]
        half = pl.ds(jax.lax.axis_index("wg") * 128, 128)
        small[half] = x_ref[half].astype(jnp.int4)
        out_ref[half] = small[half].astype(jnp.float32)

    union = plgpu.RefUnion([plgpu.SMEM(X.shape, jnp.int4)])
    with simulate() as report:
        kernel = plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct(X.shape, X.dtype),
            scratch_types=[union],
            num_threads=2,
            thread_name="wg",
        )
        np.testing.assert_array_equal(np.asarray(kernel(X)), X)
    assert report.ok, str(report)


@pytest.mark.parametrize("dtype", ["int4", "uint4", "int2", "bfloat16"])
def test_shared_memory_is_counted_in_bytes(dtype):
    def body(x_ref, out_ref, smem):
        smem[...] = jnp.abs(x_ref[...] % 2).astype(dtype)
        out_ref[...] = smem[...].astype(jnp.float32)

    out, report = run(body, [plgpu.SMEM(X.shape, dtype)])
    assert report.ok, str(report)
    np.testing.assert_array_equal(out, np.abs(X % 2))
    bits = {"int4": 4, "uint4": 4, "int2": 2, "bfloat16": 16}[dtype]
    assert report.statistics.peak_shared_bytes == X.size * bits // 8
