"""Forms of the fused matmuls: several right-hand sides, transposed ones, the gathered lhs returned.

Each form is compared with the same form through XLA, in the simulator, with its derivatives.
"""

from __future__ import annotations

import fused_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from selection import slow

import stretto as st

ROWS, COLUMNS = P("x", None), P(None, "x")
M, K = 24, 72


def draw(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(cases.whole_numbers(seed, *shape), jnp.bfloat16)


def on_mesh(fun, in_specs, out_specs, *, devices=2, check_vma=False):
    mesh = cases.mesh_of(devices)
    return jax.jit(
        jax.shard_map(fun, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma)
    )


def simulated(fun, *operands):
    with st.simulate(seed=3, core_count=2):
        results = jax.tree.map(np.asarray, fun(*operands))
    return results


def both(form, in_specs, out_specs, operands, **options):
    """Results of a form through XLA, and of its kernels in the simulator."""
    xla = on_mesh(lambda *xs: form(*xs, backend="xla"), in_specs, out_specs, **options)
    kernels = on_mesh(lambda *xs: form(*xs, backend="simulator"), in_specs, out_specs, **options)
    return jax.tree.map(np.asarray, xla(*operands)), simulated(kernels, *operands)


def assert_equal(found, expected):
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype
        np.testing.assert_array_equal(x.astype(np.float32), y.astype(np.float32))


@pytest.mark.parametrize(("transposed", "check_vma"), [slow(False, True), (True, False)])
def test_several_right_hand_sides_with_one_gather(transposed, check_vma):
    sizes = (8, 136, 72)
    rhs = tuple(draw(i, *((n, K) if transposed else (K, n))) for i, n in enumerate(sizes, 1))
    spec = ROWS if transposed else COLUMNS

    def form(lhs, *rhs, backend):
        outs, gathered = st.all_gather_matmul(
            lhs, rhs, "x", rhs_transposed=transposed, return_gathered=True, backend=backend
        )
        return outs, gathered

    expected, found = both(
        form,
        (ROWS, spec, spec, spec),
        ((COLUMNS,) * 3, P("x", None)),
        (draw(0, M, K), *rhs),
        check_vma=check_vma,
    )
    assert_equal(found, expected)
    outs, gathered = found
    whole = np.asarray(draw(0, M, K), np.float32)
    np.testing.assert_array_equal(gathered[:M].astype(np.float32), whole)
    assert [x.shape[1] for x in outs] == list(sizes)


def test_they_are_one_kernel_and_one_gather():
    lhs, rhs = draw(0, M, K), draw(1, K, 16)

    def form(backend):
        return on_mesh(
            lambda x, y: st.all_gather_matmul(x, (y, y), "x", backend=backend),
            (ROWS, COLUMNS),
            (COLUMNS, COLUMNS),
        )

    with st.simulate(seed=1, core_count=2):
        jaxpr = str(jax.make_jaxpr(form("simulator"))(lhs, rhs))
    assert jaxpr.count("stretto_kernel[") == 1
    assert str(jax.make_jaxpr(form("xla"))(lhs, rhs)).count("all_gather[") == 1


def test_an_epilogue_is_applied_to_each_and_not_to_what_was_gathered():
    def form(lhs, rhs, other, *, backend):
        return st.all_gather_matmul(
            lhs,
            (rhs, other),
            "x",
            epilogue=lambda x: jnp.maximum(x, 0),
            return_gathered=True,
            backend=backend,
        )

    expected, found = both(
        form,
        (ROWS, COLUMNS, COLUMNS),
        ((COLUMNS, COLUMNS), P("x", None)),
        (draw(0, M, K), draw(1, K, 16), draw(2, K, 24)),
    )
    assert_equal(found, expected)
    assert all(x.min() == 0 for x in found[0])
    assert found[1].min() < 0


@pytest.mark.parametrize(
    ("name", "transposed"),
    [
        slow("matmul_reduce_scatter", False),
        ("matmul_reduce_scatter", True),
        ("matmul_all_reduce", False),
        slow("matmul_all_reduce", True),
    ],
)
def test_products_of_pairs_are_added_up(name, transposed):
    ks, n = (8, 200, 16), 40
    lhs = [draw(i, M, k) for i, k in enumerate(ks)]
    rhs = [draw(10 + i, *((n, k) if transposed else (k, n))) for i, k in enumerate(ks)]
    operation = getattr(st, name)

    def form(*operands, backend):
        return operation(
            operands[:3], operands[3:], "x", rhs_transposed=transposed, backend=backend
        )

    expected, found = both(
        form,
        (COLUMNS,) * 3 + (COLUMNS if transposed else ROWS,) * 3,
        ROWS if name == "matmul_reduce_scatter" else P(None, None),
        (*lhs, *rhs),
    )
    assert_equal(found, expected)
    whole = sum(
        np.float32(x) @ (np.float32(y).T if transposed else np.float32(y))
        for x, y in zip(lhs, rhs, strict=True)
    )
    np.testing.assert_array_equal(np.float32(found), cases.rounded(whole, jnp.bfloat16))


@pytest.mark.parametrize(
    ("transposed", "kept", "check_vma"),
    [
        slow(False, False, False),
        (True, True, False),
        slow(False, True, True),
        slow(True, False, True),
    ],
)
def test_derivatives_of_several_right_hand_sides(transposed, kept, check_vma):
    shapes = [((n, K) if transposed else (K, n)) for n in (16, 40)]
    operands = (draw(0, M, K), *(draw(i, *shape) for i, shape in enumerate(shapes, 1)))
    spec = ROWS if transposed else COLUMNS
    specs = (ROWS, spec, spec)

    def form(lhs, rhs, other, *, backend):
        def loss(lhs, rhs, other):
            (a, b), gathered = st.all_gather_matmul(
                lhs,
                (rhs, other),
                "x",
                rhs_transposed=transposed,
                return_gathered=True,
                keep_gathered=kept,
                backend=backend,
            )
            # Weights make the derivatives of all elements differ, and stay whole numbers.
            return _weighed(a, 3) + _weighed(b, 5) + _weighed(gathered, 2)

        return jax.grad(loss, argnums=(0, 1, 2))(lhs, rhs, other)

    expected, found = both(form, specs, specs, operands, check_vma=check_vma)
    assert_equal(found, expected)


@pytest.mark.parametrize("transposed", [slow(False), True])
def test_derivatives_of_pairs(transposed):
    n = 24
    ks = (16, 40)
    lhs = [draw(i, M, k) for i, k in enumerate(ks)]
    rhs = [draw(5 + i, *((n, k) if transposed else (k, n))) for i, k in enumerate(ks)]
    specs = (COLUMNS, COLUMNS, *(COLUMNS if transposed else ROWS,) * 2)

    def form(*operands, backend):
        def loss(*operands):
            out = st.matmul_reduce_scatter(
                operands[:2], operands[2:], "x", rhs_transposed=transposed, backend=backend
            )
            return _weighed(out, 3)

        return jax.grad(loss, argnums=(0, 1, 2, 3))(*operands)

    expected, found = both(form, specs, specs, (*lhs, *rhs))
    assert_equal(found, expected)


def _weighed(x: jax.Array, largest: int) -> jax.Array:
    weights = jnp.arange(x.size, dtype=jnp.float32).reshape(x.shape) % (largest + 1)
    return jnp.sum(x.astype(jnp.float32) * weights)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: st.all_gather_matmul(x, (), "x"), "rhs is empty"),
        (
            lambda x: st.all_gather_matmul(x, (x.T, x), "x"),
            "lhs (12, 72) has k=72 columns and rhs (12, 72) has k=12 rows",
        ),
        (
            lambda x: st.all_gather_matmul(x, x.T, "x", rhs_transposed=True),
            "transposed rhs (72, 12) has k=12 columns",
        ),
        (lambda x: st.matmul_reduce_scatter((x, x), (x.T,), "x"), "2 lhs and 1 rhs"),
        (
            lambda x: st.matmul_reduce_scatter((x, x), (x.T, x.T[:, :8]), "x"),
            "differ: 12 x 12 of bfloat16, 12 x 8 of bfloat16",
        ),
    ],
)
def test_what_does_not_fit_is_told(call, message):
    with pytest.raises(ValueError) as caught:
        on_mesh(call, ROWS, P("x"))(draw(0, M, K))
    assert message in str(caught.value)
