"""The collectives in the simulator: along any axis, of any type and shape, bit for bit."""

from __future__ import annotations

import functools

import fused_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fused_cases import BF16, F32
from jax.sharding import PartitionSpec as P

import stretto as st
from stretto.distributed.errors import BackendUnavailableError

COPIED = ["bfloat16", "float16", "float32", "int8", "int16", "int32", "bool", "float8_e4m3fn"]
SUMMED = ["bfloat16", "float16", "float32", "int32"]

CALLS = {
    "all_gather": functools.partial(st.all_gather, axis=1),
    "reduce_scatter": functools.partial(st.reduce_scatter, axis=1),
    "all_to_all": functools.partial(st.all_to_all, split_axis=1, concat_axis=0),
    "all_reduce": st.all_reduce,
}


@pytest.fixture(autouse=True)
def simulation():
    with st.simulate(seed=3, core_count=2) as report:
        yield report
    assert report.ok, str(report)


def per_device(call, *arrays, devices=None, axis="x", mesh=None):
    """Calls `call` on each device with its entry of each array; returns what all of them got."""
    mesh = mesh or cases.mesh_of(devices or len(arrays[0]))
    spec = P(axis)

    def mapped(*xs):
        return jax.tree.map(lambda x: x[None], call(*[x[0] for x in xs]))

    program = jax.shard_map(mapped, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return jax.tree.map(np.asarray, jax.jit(program)(*arrays))


def drawn(shape, dtype, seed=0):
    """Small whole numbers: no two devices hold the same, and sums of them are exact."""
    dtype = jnp.dtype(dtype)
    low = 0 if dtype in (jnp.bool_, jnp.uint8) else -6
    values = np.random.default_rng(seed).integers(low, 2 if dtype == jnp.bool_ else 7, shape)
    return values.astype(dtype)


def same_bits(got, want):
    want = np.asarray(want)
    assert got.dtype == want.dtype and got.shape == want.shape
    assert got.tobytes() == np.ascontiguousarray(want).tobytes()


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

    @pytest.mark.parametrize("axis", [0, 1, 2, -1, -2])
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
        from stretto.kernels import moving

        x = np.random.default_rng(0).standard_normal((3, 700)).astype(jnp.bfloat16)
        one = per_device(lambda x: st.all_reduce(x, "x"), x)
        monkeypatch.setattr(moving, "ONE_SHOT_BYTES", 0)
        two = per_device(lambda x: st.all_reduce(x, "x"), x)
        for got in (*one, *two):
            same_bits(got, one[0])

    @pytest.mark.parametrize("position", range(8))
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


class TestMeshes:
    @pytest.mark.parametrize("axis", ["x", "y"])
    def test_two_teams_at_once_do_not_mix(self, axis):
        x = drawn((4, 6, 10), "float32").reshape(2, 2, 6, 10)
        mesh = cases.mesh_of(2, 2)

        def call(x):
            return tuple(
                out[None, None]
                for out in (
                    st.all_gather(x[0, 0], axis),
                    st.all_reduce(x[0, 0], axis),
                    st.reduce_scatter(x[0, 0], axis),
                    st.all_to_all(x[0, 0], axis, split_axis=0, concat_axis=1),
                )
            )

        spec = P("x", "y")
        program = jax.shard_map(call, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        gathered, reduced, scattered, exchanged = map(np.asarray, jax.jit(program)(x))
        for i in range(2):
            for j in range(2):
                team, me = (x[:, j], i) if axis == "x" else (x[i], j)
                same_bits(gathered[i, j], team.reshape(-1, 10))
                same_bits(reduced[i, j], team.sum(0))
                same_bits(scattered[i, j], team.sum(0)[3 * me :][:3])
                same_bits(exchanged[i, j], np.concatenate([t[3 * me :][:3] for t in team], axis=1))

    def test_a_tuple_of_axes(self):
        x = drawn((4, 8, 3), "bfloat16")
        mesh = cases.mesh_of(2, 2)
        for axes in (("x", "y"), ("y", "x")):
            order = [0, 1, 2, 3] if axes == ("x", "y") else [0, 2, 1, 3]
            for got in per_device(lambda x: st.all_gather(x, axes), x, axis=("x", "y"), mesh=mesh):  # noqa: B023
                same_bits(got, x[order].reshape(-1, 3))


class TestDerivatives:
    @pytest.mark.parametrize("check_vma", [False, True])
    @pytest.mark.parametrize("name", CALLS)
    def test_they_are_those_of_lax(self, name, check_vma):
        x = drawn((2 * 4, 6), "float32")
        mesh = cases.mesh_of(2)
        out_spec = P(None) if name == "all_reduce" else P("x")

        def gradient(backend):
            def call(x):
                return CALLS[name](x, axis_name="x", backend=backend)

            mapped = jax.shard_map(
                call, mesh=mesh, in_specs=P("x"), out_specs=out_spec, check_vma=check_vma
            )

            def loss(x):
                out = mapped(x)
                return jnp.sum(jnp.sin(jnp.arange(out.size)).reshape(out.shape) * out)

            return jax.jit(jax.grad(loss))(x)

        if name == "all_gather" and check_vma:
            out_spec = P("x")
        np.testing.assert_allclose(gradient("pallas"), gradient("xla"), rtol=1e-6)

    @pytest.mark.parametrize("name", CALLS)
    def test_vmap_is_a_loop(self, name):
        x = drawn((3, 2 * 4, 6), "float32")
        out_spec = P(None) if name == "all_reduce" else P("x")

        def mapped(backend):
            return jax.shard_map(
                functools.partial(CALLS[name], axis_name="x", backend=backend),
                mesh=cases.mesh_of(2),
                in_specs=P("x"),
                out_specs=out_spec,
                check_vma=False,
            )

        got, want = (jax.jit(jax.vmap(mapped(backend)))(x) for backend in ("pallas", "xla"))
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


class TestErrors:
    @pytest.mark.parametrize(
        ("call", "message"),
        [
            (lambda x: st.all_gather(x, "x", axis=2), r"axis=2 is out of range .* 2 dimensions"),
            (lambda x: st.reduce_scatter(x, "x", axis=-3), r"axis=-3 is out of range"),
            (lambda x: st.reduce_scatter(x, "x"), r"dimension 0=5 must be a multiple of the 2 dev"),
            (
                lambda x: st.all_to_all(x, "x", split_axis=1, concat_axis=0),
                r"dimension 1=3 must be a multiple of the 2 devices; pad it to 4",
            ),
            (
                lambda x: st.all_to_all(x, "x", split_axis=0, concat_axis=9),
                r"concat_axis=9 is out of range",
            ),
            (lambda x: st.all_reduce(x, "x", backend="nccl"), r"backend='nccl' is not one of"),
            (lambda x: st.all_reduce(x, "y"), r"axis 'y' is not among .*\('x',\)"),
        ],
    )
    def test_bad_arguments(self, call, message):
        with pytest.raises(ValueError, match=message):
            per_device(call, np.zeros((2, 5, 3), np.float32))

    @pytest.mark.parametrize("op", [st.all_reduce, st.reduce_scatter])
    def test_a_type_that_the_kernel_does_not_add(self, op):
        x = np.ones((2, 2), np.int8)
        with pytest.raises(BackendUnavailableError, match=r"the kernel adds .*, not int8"):
            per_device(lambda x: op(x, "x", backend="pallas"), x)
        np.testing.assert_array_equal(per_device(lambda x: op(x, "x"), x).astype(np.int32).max(), 2)

    def test_outside_of_shard_map(self):
        with pytest.raises(ValueError, match=r"axis 'x' is not bound: call this inside"):
            st.all_gather(jnp.zeros(4), "x")


@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter", "all_reduce", "all_to_all"])
def test_the_same_calls_many_times_with_new_data(name):
    """Back-to-back calls in one program, each with its own payload (B01, B02)."""
    x = np.stack([drawn((2, 4, 6), "float32", seed) for seed in range(6)], axis=1)

    def each(x):
        call = CALLS[name]
        return jax.lax.map(lambda one: call(one, axis_name="x"), x)

    plain = functools.partial(CALLS[name], axis_name="x", backend="xla")
    got = per_device(each, x)
    want = per_device(lambda x: jax.lax.map(plain, x), x)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("backend", ["xla", "pallas"])
def test_as_many_collectives_as_needed(backend):
    """One each by XLA, and none at all beside the fused kernels."""

    def call(x):
        y = st.all_gather(x[0], "x", backend=backend)
        y = st.reduce_scatter(y, "x", backend=backend)
        y = st.all_to_all(y, "x", split_axis=0, concat_axis=0, backend=backend)
        return st.all_reduce(y, "x", backend=backend)[None]

    x = np.zeros((2, 4, 4), F32)
    program = jax.shard_map(
        call, mesh=cases.mesh_of(2), in_specs=P("x"), out_specs=P("x"), check_vma=False
    )
    found = cases.collectives(jax.jit(program).lower(x).compile().as_text())
    assert sum(found.values()) == (4 if backend == "xla" else 0), found
