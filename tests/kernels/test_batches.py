"""Operands with more dimensions than a matrix, and batches of `vmap`: the numbers of `lax`."""

from __future__ import annotations

import functools
from typing import Any

import fused_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from selection import slow

import stretto as st
from stretto.kernels.fused import row_blocks

DEVICES, K, N = 2, 16, 24
# Of lhs on one device, without k; the axis that is gathered, or scattered after the product.
QUICK = [((2, 4, 3), -3)]
SHAPES = [((3, 4), 1), ((3, 4), 0), ((1, 4), 1), ((2, 4, 3), 1), ((2, 1, 4), 2)]
SHAPES = [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SHAPES)]
BACKENDS = ["auto", "simulator"]
# All others are slow: each is simulated.
QUICK_FORMS = [("all_gather_matmul", 0, True), ("matmul_reduce_scatter", 1, False)]
FORMS = [
    pytest.param(name, of, both, marks=() if quick else (pytest.mark.slow,))
    for name in cases.FORMS
    for of, both in [(0, False), (1, False), (0, True)]
    for quick in [(name, of, both) in QUICK_FORMS]
]


def gathered(x, w, axis):
    whole = lax.all_gather(x, "x", axis=axis % x.ndim, tiled=True)
    return jnp.einsum("...k,kn->...n", whole, w, preferred_element_type=jnp.float32)


def scattered(x, w, axis):
    out = jnp.einsum("...k,kn->...n", x, w, preferred_element_type=jnp.float32).astype(x.dtype)
    return lax.psum_scatter(out, "x", scatter_dimension=axis % x.ndim, tiled=True)


def on_devices(call, *operands):
    """`call` on two devices, each with operands of its own; its results side by side."""
    mapped = jax.shard_map(
        lambda *xs: jax.tree.map(lambda y: y[None], call(*(x[0] for x in xs))),
        mesh=cases.mesh_of(DEVICES),
        in_specs=P("x"),
        out_specs=P("x"),
        check_vma=False,
    )
    return jax.tree.map(lambda y: np.asarray(y, np.float32), jax.jit(mapped)(*operands))


def drawn(*shape, seed=0):
    return jnp.asarray(cases.whole_numbers(seed, DEVICES, *shape), cases.BF16)


def same(call, plain, *operands):
    jax.tree.map(
        np.testing.assert_array_equal, on_devices(call, *operands), on_devices(plain, *operands)
    )


def gradients(call):
    """Of a weighted sum, by both operands: whole numbers, in float32."""

    def loss(x, w):
        out = call(x, w).astype(jnp.float32)
        return jnp.sum(out * (jnp.arange(out.size).reshape(out.shape) % 3 - 1))

    return jax.grad(loss, (0, 1))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("shape", "axis"), SHAPES)
def test_all_gather_matmul(shape, axis, backend):
    call = functools.partial(st.all_gather_matmul, axis_name="x", axis=axis, backend=backend)
    plain = functools.partial(gathered, axis=axis)
    operands = drawn(*shape, K), drawn(K, N, seed=1)
    same(call, lambda x, w: plain(x, w).astype(x.dtype), *operands)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("shape", "axis"), SHAPES)
def test_matmul_reduce_scatter(shape, axis, backend):
    call = functools.partial(st.matmul_reduce_scatter, axis_name="x", axis=axis, backend=backend)
    shape = tuple(DEVICES * s if i == axis % (len(shape) + 1) else s for i, s in enumerate(shape))
    same(call, functools.partial(scattered, axis=axis), drawn(*shape, K), drawn(K, N, seed=1))


@pytest.mark.parametrize("backend", [slow("auto"), "simulator"])
def test_gradients(backend):
    x, w = drawn(3, 4, K), drawn(K, N, seed=1)
    for call, plain in [(st.all_gather_matmul, gathered), (st.matmul_reduce_scatter, scattered)]:
        ours = functools.partial(call, axis_name="x", axis=1, backend=backend)
        same(gradients(ours), gradients(functools.partial(plain, axis=1)), x, w)


def with_arrays(x, w, residual, scale):
    """A gather of a batch: `product * scale + residual`, a row of either for each of the result."""
    function = lambda y, r, s: y * s + r  # noqa: E731
    epilogue = function, residual, scale
    return st.all_gather_matmul(x, w, "x", axis=1, epilogue=epilogue, backend="simulator")


def test_blocks_of_whole_tiles_are_gathered_without_copies(monkeypatch):
    """Into their places, and so are the arrays of an epilogue."""
    x, w = drawn(2, 256, K), drawn(K, N, seed=1)
    residual, scale = drawn(2, 512, N, seed=2), drawn(2, 512, 1, seed=3)

    def wanted(x, w, residual, scale):
        out = gathered(x, w, axis=1)
        return (out * scale + residual.astype(jnp.float32)).astype(x.dtype)

    monkeypatch.setattr(row_blocks, "_swapped", None)  # Nothing calls it.
    same(with_arrays, wanted, x, w, residual, scale)


def test_blocks_of_whole_tiles_are_scattered_without_copies(monkeypatch):
    x, w = drawn(2, 512, K), drawn(K, N, seed=1)
    monkeypatch.setattr(row_blocks, "_swapped", None)
    ours = functools.partial(st.matmul_reduce_scatter, axis_name="x", axis=1, backend="simulator")
    same(ours, functools.partial(scattered, axis=1), x, w)


@pytest.mark.slow
@pytest.mark.parametrize("keep", [False, True])
def test_gradients_of_blocks_of_whole_tiles(keep):
    x, w = drawn(2, 128, K), drawn(K, N, seed=1)
    ours = functools.partial(
        st.all_gather_matmul, axis_name="x", axis=1, backend="simulator", keep_gathered=keep
    )
    same(gradients(ours), gradients(functools.partial(gathered, axis=1)), x, w)
    ours = functools.partial(st.matmul_reduce_scatter, axis_name="x", axis=1, backend="simulator")
    x = drawn(2, 256, K)
    same(gradients(ours), gradients(functools.partial(scattered, axis=1)), x, w)


@pytest.mark.parametrize(
    "name", ["all_gather_matmul", pytest.param("matmul_reduce_scatter", marks=pytest.mark.slow)]
)
def test_an_epilogue_that_no_kernel_holds_sees_the_batch(name):
    """It uses a value of the device and the place in the batch, and follows the kernel."""
    gathers = name == "all_gather_matmul"

    def of(w):
        return lambda y: jax.nn.softplus(y) * w[0, 0] + jnp.arange(y.shape[1])[:, None]

    def ours(x, w):
        given: dict[str, Any] = dict(axis_name="x", axis=1, epilogue=of(w), backend="simulator")
        said = st.explain(getattr(st, name), x, w, **given).reason
        assert "XLA applies the epilogue to the kernel's product: the epilogue <lambda>" in said
        return getattr(st, name)(x, w, **given)

    def plain(x, w):
        product = (gathered if gathers else scattered)(x, w, axis=1).astype(x.dtype)
        return of(w)(product.astype(jnp.float32)).astype(x.dtype)

    same(ours, plain, drawn(3, 4, K), drawn(K, N, seed=1))


@pytest.mark.parametrize("backend", [slow("auto"), "simulator"])
def test_all_else_that_takes_a_batch(backend):
    x, w, other = drawn(3, 4, K), drawn(K, N, seed=1), drawn(K, 8, seed=2)
    options = dict(axis_name="x", backend=backend)

    def both(x, w, other):
        return st.all_gather_matmul(x, (w, other), axis=1, return_gathered=True, **options)

    def plain(x, w, other):
        whole = lax.all_gather(x, "x", axis=1, tiled=True)
        return tuple((whole @ y).astype(x.dtype) for y in (w, other)), whole

    same(both, plain, x, w, other)
    summed = functools.partial(st.matmul_all_reduce, **options)
    same(summed, lambda x, w: lax.psum(x @ w, "x"), x, w)
    wide = drawn(DEVICES * K, N, seed=3)
    columns = functools.partial(st.all_gather_matmul, gather_axis="k", **options)
    same(columns, lambda x, w: lax.all_gather(x, "x", axis=2, tiled=True) @ w, x, wide)
    weights = functools.partial(st.all_gather_matmul, gather_axis="n", **options)
    same(weights, lambda x, w: x @ lax.all_gather(w, "x", axis=1, tiled=True), x, w)


def test_what_is_copied_is_said():
    said = []

    def body(x, w, backend="auto"):
        for axis in (0, 1):
            options = dict(axis=axis, backend=backend)
            said.append(str(st.explain(st.all_gather_matmul, x, w, "x", **options)))
            said.append(str(st.explain(st.matmul_reduce_scatter, x, w, "x", **options)))
        return x

    with st.simulate(seed=0):
        on_devices(body, drawn(256, 64, 16), drawn(16, 256, seed=1))
    # The gathered result, 256 x 128 x 256; and lhs of the scatter, 256 x 64 x 16.
    assert ["MiB are copied" in text for text in said] == [False, False, True, True]
    assert "16 MiB" in said[2] and "0.5 MiB" in said[3]
    blocks = drawn(2, 512, 16), drawn(16, 256, seed=1)  # Of whole tiles.
    for backend in ("auto", "simulator"):
        said.clear()
        with st.simulate(seed=0):
            on_devices(functools.partial(body, backend=backend), *blocks)
        assert ["MiB are copied" in text for text in said] == [False] * 4


@pytest.mark.parametrize(("name", "of", "both"), FORMS)
def test_vmap_is_one_launch_where_one_operand_has_a_batch(name, of, both):
    """And a launch each where both have."""
    m, k, n = cases.whole(name, 1, 16, 16, 24)
    lhs, rhs = drawn(3, m, k), drawn(3, DEVICES * k if name.endswith("_k") else k, n, seed=1)
    axes = (0, 0) if both else (0, None) if of == 0 else (None, 0)
    operands = [x if axis == 0 else x[:, 0] for x, axis in zip((lhs, rhs), axes, strict=True)]

    def mapped(backend):
        call = functools.partial(cases.FORMS[name], axis_name="x", backend=backend)
        return jax.vmap(call, axes)

    wanted = on_devices(mapped("xla"), *operands)
    with st.simulate(seed=0) as report:
        found = on_devices(mapped("auto"), *operands)
    np.testing.assert_array_equal(found, wanted)
    assert report.launches == (3 if both else 1)


@pytest.mark.parametrize("backward", [slow(False), True])
def test_vmap_of_collectives_is_one_launch(backward):
    calls = {
        "gather": lambda x: st.all_gather(x, "x", axis=1),
        "scatter": lambda x: st.reduce_scatter(x, "x"),
        "sum": lambda x: st.all_reduce(x, "x"),
        "exchange": lambda x: st.all_to_all(x, "x", split_axis=0, concat_axis=1),
    }
    for call in calls.values():

        def mapped(x, call=call):
            if not backward:
                return jax.vmap(call)(x)
            return jax.grad(lambda x: jnp.sum(jax.vmap(call)(x) * 2))(x)

        x = drawn(3, 4, 6)
        wanted = on_devices(mapped, x)
        with st.simulate(seed=0) as report:
            found = on_devices(lambda x, mapped=mapped: mapped(x), x)
        np.testing.assert_array_equal(found, wanted)
        # Linear: backward alone is left, and that of a sum is a sum by XLA.
        assert report.launches == (not backward or call is not calls["sum"])


@pytest.mark.parametrize("axis", [2, -1, 3])
def test_axes_that_are_no_rows(axis):
    said = "is the contraction" if axis != 3 else "out of range"
    for call in (st.all_gather_matmul, st.matmul_reduce_scatter):
        with pytest.raises(ValueError, match=said):
            on_devices(
                functools.partial(call, axis_name="x", axis=axis), drawn(2, 4, K), drawn(K, N)
            )
    with pytest.raises(ValueError, match=r"axis=0 is for gather_axis='m' only"):
        on_devices(
            lambda x, w: st.all_gather_matmul(x, w, "x", axis=0, gather_axis="k"),
            drawn(2, 4, K),
            drawn(DEVICES * K, N),
        )
