"""The collectives in the simulator: along any axis, of any type and shape, bit for bit."""

from __future__ import annotations

import fused_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collective_checks import drawn, per_device, same_bits
from fused_cases import BF16
from jax import lax
from jax.sharding import PartitionSpec as P
from selection import slow

import stretto as st
from stretto.kernels.collectives import arrays

COPIED = [
    *("bfloat16", "float16", "float32", "int8", "int16", "int32", "bool", "float8_e4m3fn"),
    *("complex64", "int4", "uint4", "int2", "float4_e2m1fn"),
]
# What XLA adds; it takes no other types for sums.
SUMMED_BY_XLA = ["bool", "int8", "uint16", "uint32", "int4", "float8_e5m2", "complex64"]
SUMMED = ["bfloat16", "float16", "float32", "int32"]


@pytest.fixture(autouse=True)
def simulation():
    with st.simulate(seed=3, core_count=2) as report:
        yield report
    assert report.ok, str(report)


class TestAllGather:
    @pytest.mark.parametrize("devices", [1, 2, 3, 5, 8])
    def test_any_team(self, devices, simulation):
        x = drawn((devices, 7, 33), "bfloat16")
        out = per_device(lambda x: st.all_gather(x, "x"), x)
        for got in out:
            same_bits(got, x.reshape(-1, 33))
        assert simulation.launches == (devices > 1)

    @pytest.mark.parametrize("dtype", COPIED)
    def test_any_type(self, dtype):
        x = drawn((2, 5, 12), dtype)
        for got in per_device(lambda x: st.all_gather(x, "x"), x):
            same_bits(got, x.reshape(-1, 12))

    @pytest.mark.parametrize("axis", [0, slow(1), slow(2), -1, slow(-2)])
    def test_any_axis(self, axis):
        x = drawn((2, 4, 6, 10), "int32")
        for got in per_device(lambda x: st.all_gather(x, "x", axis=axis), x):
            same_bits(got, np.concatenate(list(x), axis=axis))

    @pytest.mark.parametrize("shape", [(1,), (127,), (129, 3), (1, 1, 1), (300, 256)])
    def test_any_shape(self, shape):
        x = drawn((3, *shape), "float32")
        for got in per_device(lambda x: st.all_gather(x, "x"), x):
            same_bits(got, np.concatenate(list(x)))

    @pytest.mark.parametrize(
        "payload",
        ["0x00000000", "0x80000000", "0x80011653", "0x7fc12345", "0xffa00001", "0x7f800000"],
    )
    def test_no_payload_is_special(self, payload):
        """Zeros of both signs, subnormals, NaNs with and without a payload, infinities (B46)."""
        bits = np.full((2, 40), int(payload, 16), np.uint32)
        bits[1, ::2] ^= 1
        for got in per_device(lambda x: st.all_gather(x, "x"), bits.view(np.float32)):
            assert got.tobytes() == bits.tobytes()

    def test_bytes_of_ones(self):
        x = np.full((2, 513), 0xFF, np.uint8)
        for got in per_device(lambda x: st.all_gather(x, "x"), x):
            same_bits(got, x.reshape(-1))


class TestAllToAll:
    @pytest.mark.parametrize("devices", [1, 2, 3, 5, 8])
    def test_any_team(self, devices):
        x = drawn((devices, devices * 3, 5), "bfloat16")
        out = per_device(lambda x: st.all_to_all(x, "x", split_axis=0, concat_axis=0), x)
        parts = x.reshape(devices, devices, 3, 5)
        for device, got in enumerate(out):
            same_bits(got, parts[:, device].reshape(-1, 5))

    @pytest.mark.parametrize("dtype", COPIED)
    def test_any_type(self, dtype):
        x = drawn((2, 4, 6), dtype)
        out = per_device(lambda x: st.all_to_all(x, "x", split_axis=0, concat_axis=1), x)
        for device, got in enumerate(out):
            same_bits(got, np.concatenate([part[2 * device :][:2] for part in x], axis=1))

    @pytest.mark.parametrize("split", [0, 1, -1])
    @pytest.mark.parametrize("concat", [0, 1, -1])
    def test_any_axes(self, split, concat):
        x = drawn((2, 4, 6, 8), "float32")
        out = per_device(lambda x: st.all_to_all(x, "x", split_axis=split, concat_axis=concat), x)
        for device, got in enumerate(out):
            parts = [np.split(one, 2, axis=split)[device] for one in x]
            same_bits(got, np.concatenate(parts, axis=concat))


class TestSums:
    @pytest.mark.parametrize("devices", [1, 2, 3, 5, 8])
    def test_any_team(self, devices):
        x = drawn((devices, devices * 3, 5), "bfloat16")
        total = x.astype(np.float32).sum(0)

        def both(x):
            return st.all_reduce(x, "x"), st.reduce_scatter(x, "x")

        reduced, scattered = per_device(both, x)
        for device in range(devices):
            np.testing.assert_array_equal(reduced[device].astype(np.float32), total)
            np.testing.assert_array_equal(
                scattered[device].astype(np.float32), total[3 * device :][:3]
            )

    @pytest.mark.parametrize("dtype", SUMMED)
    def test_any_type(self, dtype):
        x = drawn((3, 6, 50), dtype)
        reduced, scattered = per_device(
            lambda x: (st.all_reduce(x, "x"), st.reduce_scatter(x, "x")), x
        )
        for device in range(3):
            same_bits(reduced[device], x.astype(np.float32).sum(0).astype(x.dtype))
            same_bits(
                scattered[device], x.astype(np.float32).sum(0).astype(x.dtype)[2 * device :][:2]
            )

    @pytest.mark.parametrize("dtype", SUMMED_BY_XLA)
    def test_what_is_left_to_lax(self, dtype, simulation):
        x = drawn((2, 4, 6), dtype)

        def both(x):
            pairs = [(st.all_reduce(x, "x"), lax.psum(x, "x"))]
            if dtype != "bool":  # Which lax refuses.
                scattered = lax.psum_scatter(x, "x", tiled=True)
                pairs.append((st.reduce_scatter(x, "x"), scattered))
            return pairs

        for got, want in per_device(both, x):
            same_bits(got, want)
        assert not simulation.launches

    @pytest.mark.parametrize("axis", [0, 1, 2, -1])
    def test_any_axis(self, axis):
        x = drawn((2, 4, 6, 10), "float32")
        out = per_device(lambda x: st.reduce_scatter(x, "x", axis=axis), x)
        for device, got in enumerate(out):
            same_bits(got, np.split(x.sum(0), 2, axis=axis)[device])

    @pytest.mark.parametrize("shape", [(), (1,), (127,), (129, 3), (1, 1, 1)])
    def test_any_shape(self, shape):
        x = drawn((3, *shape), "float32")
        for got in per_device(lambda x: st.all_reduce(x, "x"), x):
            same_bits(got, x.sum(0))

    def test_one_shot_and_two_shots_are_bitwise_the_same(self, monkeypatch):
        x = np.random.default_rng(0).standard_normal((3, 700)).astype(jnp.bfloat16)
        one = per_device(lambda x: st.all_reduce(x, "x"), x)
        monkeypatch.setattr(arrays, "ONE_SHOT_BYTES", 0)
        two = per_device(lambda x: st.all_reduce(x, "x"), x)
        for got in (*one, *two):
            same_bits(got, one[0])

    @pytest.mark.parametrize("position", [0, *map(slow, range(1, 7)), 7])
    def test_small_terms_are_not_lost_beside_a_large_one(self, position):
        """256 + 1 is 256 in bfloat16: sums are made in float32, wherever the large one is (B45)."""
        x = np.ones((8, 8, 4), np.float32)
        x[position] = 256
        for got in per_device(
            lambda x: (st.all_reduce(x, "x"), st.reduce_scatter(x, "x")), x.astype(jnp.bfloat16)
        ):
            np.testing.assert_array_equal(
                got.astype(np.float32), cases.rounded(np.full(got.shape, 263.0), BF16)
            )

    @pytest.mark.parametrize("where", [0, 2])
    def test_nan_infinity_and_signs_of_zero_are_kept_whoever_has_them(self, where):
        x = np.zeros((3, 5), np.float32)
        x[where, 1] = np.nan
        x[where, 2] = np.inf
        x[:2, 3] = [np.inf, -np.inf]
        x[:, 4] = -0.0
        for got in per_device(lambda x: st.all_reduce(x, "x"), x):
            np.testing.assert_array_equal(got, [0, np.nan, np.inf, np.nan, 0])
            np.testing.assert_array_equal(np.signbit(got[[0, 4]]), [False, True])

    def test_the_least_integer(self):
        x = np.array([[-(2**31), 5], [0, 2**31 - 6]], np.int32)
        for got in per_device(lambda x: st.all_reduce(x, "x"), x):
            np.testing.assert_array_equal(got, [-(2**31), 2**31 - 1])


class TestNarrowNumbers:
    """Several to a byte where they come out even, one each where they do not."""

    @pytest.mark.parametrize("axis", [0, 1])
    @pytest.mark.parametrize(("dtype", "columns"), [("int2", 6), slow("int2", 8), ("uint4", 6)])
    def test_gathered_and_exchanged(self, dtype, axis, columns):
        x = drawn((2, 4, columns), dtype)

        def both(x, backend):
            options = dict(split_axis=axis, concat_axis=1 - axis, backend=backend)
            return [
                st.all_gather(x, "x", axis=axis, backend=backend),
                st.all_to_all(x, "x", **options),
            ]

        results = per_device(lambda x: [both(x, "auto"), both(x, "xla")], x)
        for gathered, exchanged in results:
            for device in range(2):
                same_bits(gathered[device], np.concatenate(list(x), axis))
                parts = [np.split(row, 2, axis)[device] for row in x]
                same_bits(exchanged[device], np.concatenate(parts, 1 - axis))

    def test_a_scalar_of_each_device(self):
        x = drawn((2, 1), "int4")
        for got in per_device(lambda x: st.all_gather(x, "x"), x):
            same_bits(got, x.reshape(-1))


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("impl", ["threefry2x32", slow("rbg")])
def test_random_keys(impl, check_vma):
    keys = jax.random.split(jax.random.key(7, impl=impl), (4, 6))

    def both(keys):
        exchanged = st.all_to_all(keys, "x", split_axis=1, concat_axis=0)
        return st.all_gather(keys, "x", axis=-1), exchanged

    mapped = jax.shard_map(
        both, mesh=cases.mesh_of(2), in_specs=P("x"), out_specs=(P("x"), P(None, "x")),
        check_vma=check_vma,
    )  # fmt: skip
    gathered, exchanged = jax.jit(mapped)(keys)
    assert gathered.dtype == exchanged.dtype == keys.dtype
    numbers = np.asarray(jax.random.key_data(keys))
    rows = np.concatenate(np.split(numbers, 2), axis=1)
    np.testing.assert_array_equal(jax.random.key_data(gathered), np.concatenate([rows, rows]))
    np.testing.assert_array_equal(jax.random.key_data(exchanged), numbers)


@pytest.mark.parametrize("part", ["real", "imag"])
def test_parts_of_complex_numbers_keep_their_bits(part):
    """Also a NaN's payload, and the sign of a zero."""
    x = np.full((2, 3), complex(-0.0, -0.0), np.complex64)
    getattr(x, part)[1] = np.array([0x7FC12345, 0x80011653, 0xFF800000], np.uint32).view(np.float32)
    for got in per_device(lambda x: st.all_gather(x, "x"), x):
        same_bits(got, x.reshape(-1))


@pytest.mark.parametrize("dtype", ["complex64", "float8_e5m2"])
def test_derivatives_of_types_that_the_kernel_does_not_add(dtype):
    x = drawn((2, 3), dtype)

    def gradient(x, backend):
        def loss(x):
            return (2 * abs(st.all_gather(x, "x", backend=backend).astype("complex64"))).sum()

        return jax.grad(loss)(x)

    for got, want in zip(
        *(per_device(lambda x, b=b: gradient(x, b), x) for b in ("pallas", "xla")), strict=True
    ):
        same_bits(got, want)


class TestEmpty:
    """Arrays without elements keep their type and their other sizes, and start no kernel (B37)."""

    @pytest.mark.parametrize("shape", [(0, 6), (6, 0)])
    def test_all(self, shape, simulation):
        rows, columns = shape

        def call(x):
            return (
                st.all_gather(x, "x"),
                st.all_reduce(x, "x"),
                st.reduce_scatter(x, "x"),
                st.all_to_all(x, "x", split_axis=0, concat_axis=1),
            )

        outs = per_device(call, np.zeros((2, *shape), jnp.bfloat16))
        parts = [(2 * rows, columns), shape, (rows // 2, columns), (rows // 2, 2 * columns)]
        assert [out.shape[1:] for out in outs] == parts
        assert {out.dtype for out in outs} == {jnp.dtype(BF16)}
        assert simulation.launches == 0
