"""Maxima and minima, trees of arrays, stacked shards: the numbers of `lax`."""

from __future__ import annotations

import functools

import fused_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from selection import slow

import stretto as st

DEVICES = 2


def on_devices(call, *operands, typed=False):
    """`call` on two devices, each with operands of its own; its results side by side."""
    mapped = jax.shard_map(
        lambda *xs: jax.tree.map(lambda y: y[None], call(*jax.tree.map(lambda x: x[0], xs))),
        mesh=cases.mesh_of(DEVICES),
        in_specs=P("x"),
        out_specs=P("x"),
        check_vma=typed,
    )
    return jax.tree.map(np.asarray, jax.jit(mapped)(*operands))


def drawn(*shape, seed=0, dtype=cases.F32):
    return jnp.asarray(cases.whole_numbers(seed, DEVICES, *shape, largest=9), dtype)


def tree():
    return {
        "a": drawn(4, 6),
        "b": [drawn(8, seed=1), drawn(2, 3, seed=2, dtype=jnp.int32), drawn(2, 1, 5, seed=3)],
        "c": drawn(4, 4, seed=4, dtype=jnp.int32),
    }


def same(ours, plain, *operands, **options):
    found, wanted = on_devices(ours, *operands, **options), on_devices(plain, *operands, **options)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)


@pytest.mark.parametrize("backend", ["auto", "simulator"])
@pytest.mark.parametrize(
    ("dtype", "op"),
    [
        ("bfloat16", "max"),
        ("float32", "min"),
        ("int32", "min"),
        slow("bfloat16", "min"),
        slow("float32", "max"),
        slow("int32", "max"),
    ],
)
def test_extremes(op, dtype, backend):
    plain = {"max": lax.pmax, "min": lax.pmin}[op]
    x = drawn(6, 40, dtype=dtype)
    ours = functools.partial(st.all_reduce, axis_name="x", op=op, backend=backend)
    same(ours, lambda x: plain(x, "x"), x)
    ours = functools.partial(st.reduce_scatter, axis_name="x", axis=1, op=op, backend=backend)
    same(
        ours, lambda x: lax.dynamic_slice_in_dim(plain(x, "x"), lax.axis_index("x") * 20, 20, 1), x
    )


@pytest.mark.parametrize("backend", ["auto", "simulator"])
@pytest.mark.parametrize("call", [st.all_reduce, functools.partial(st.reduce_scatter, axis=1)])
@pytest.mark.parametrize("typed", [False, True])
def test_derivatives_of_extremes(call, backend, typed):
    """Those of `jnp.max` over a dimension that all devices' arrays lie along."""
    x = drawn(3, 4)
    weights = jnp.arange(12.0).reshape(3, 4)

    def whole(x):
        return jnp.sum(jnp.max(x, 0) * weights)

    def ours(x):
        def loss(x):
            out = call(x, "x", op="max", backend=backend)
            if out.shape == (3, 4):  # Each device has all of it: a share each.
                return jnp.sum(out * weights) / (1 if typed else DEVICES)
            own = lax.dynamic_slice_in_dim(weights, lax.axis_index("x") * 2, 2, 1)
            return jnp.sum(out * own)

        return jax.grad(loss)(x)

    found = on_devices(ours, x, typed=typed)
    np.testing.assert_allclose(found, jax.grad(whole)(x), rtol=1e-6)


OPERATIONS = {
    "gather": (
        functools.partial(st.all_gather, axis_name="x", axis=-1),
        lambda x: lax.all_gather(x, "x", axis=x.ndim - 1, tiled=True),
    ),
    "stack": (
        functools.partial(st.all_gather, axis_name="x", axis=1, tiled=False),
        lambda x: lax.all_gather(x, "x", axis=1),
    ),
    "scatter": (
        functools.partial(st.reduce_scatter, axis_name="x"),
        lambda x: lax.psum_scatter(x, "x", tiled=True),
    ),
    "sum": (functools.partial(st.all_reduce, axis_name="x"), lambda x: lax.psum(x, "x")),
    "max": (functools.partial(st.all_reduce, axis_name="x", op="max"), lambda x: lax.pmax(x, "x")),
    "exchange": (
        functools.partial(st.all_to_all, axis_name="x", split_axis=0, concat_axis=-1),
        lambda x: lax.all_to_all(x, "x", 0, x.ndim - 1, tiled=True),
    ),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_tree_is_a_launch_for_each_type(name):
    ours, plain = OPERATIONS[name]
    same(ours, lambda xs: jax.tree.map(plain, xs), tree())
    with st.simulate(seed=0) as report:
        same(ours, lambda xs: jax.tree.map(plain, xs), tree())
    assert report.launches == 2


def test_gradient_of_a_tree():
    def gradient(call):
        def loss(xs):
            return sum(jnp.sum(x * x) for x in call(xs))

        return jax.grad(loss)

    floats = drawn(4, 6), drawn(2, seed=1)
    plain = lambda xs: tuple(lax.all_gather(x, "x", tiled=True) for x in xs)  # noqa: E731
    with st.simulate(seed=0) as report:
        same(gradient(lambda xs: st.all_gather(xs, "x")), gradient(plain), floats)
    assert report.launches == 2


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -3])
@pytest.mark.parametrize("backend", ["auto", "simulator"])
def test_stacked(axis, backend):
    x = drawn(3, 4)
    ours = functools.partial(st.all_gather, axis_name="x", axis=axis, tiled=False, backend=backend)
    same(ours, lambda x: lax.all_gather(x, "x", axis=axis), x)


def test_bad_input():
    for call, said in [
        (lambda x: st.all_reduce(x, "x", op="mean"), "op='mean' is not one of 'sum', 'max', 'min'"),
        (lambda x: st.all_reduce([x, 1.0], "x"), "x=1.0 is of type float; it must be an array"),
        (lambda x: st.all_gather(x, "x", axis=3, tiled=False), "axis=3 is out of range for a res"),
        (lambda x: st.reduce_scatter([x, x[:3]], "x"), "dimension 0=3 must be a multiple of"),
        (lambda x: st.reduce_scatter(x > 0, "x"), "x is bool, which has no sum of its type"),
        (lambda x: st.reduce_scatter([x, x > 0], "x"), "x is bool, which has no sum of its type"),
    ]:
        with pytest.raises(ValueError, match=said):
            on_devices(call, drawn(4, 4))
