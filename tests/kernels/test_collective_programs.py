"""The collectives in programs: meshes, derivatives, many calls; and what they refuse."""

from __future__ import annotations

import functools

import fused_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collective_checks import drawn, per_device, same_bits
from fused_cases import F32
from jax.sharding import PartitionSpec as P

import stretto as st
from stretto.distributed.errors import BackendUnavailableError

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
            (
                lambda _: st.all_gather([1, 2], "x"),
                "all_gather: x=1 is of type int; it must be an array",
            ),
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
