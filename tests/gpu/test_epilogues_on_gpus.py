"""Epilogues with arrays or of two products, and batches whose rows the kernel puts in order."""

from __future__ import annotations

import functools

import fused_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import stretto as st
from stretto.kernels.engine.hopper.tile_config import TileConfig
from stretto.kernels.fused.all_gather_matmul import Config

E = st.epilogues
COLUMNS, SEQUENCE, BOTH = P(None, "x"), P(None, "x"), P(None, None, "x")


def gelu(y):
    return 0.5 * y * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3)))


def silu(y):
    return y / (1 + np.exp(-y))


# Of the arrays "row" `[n]`, "column" `[m, 1]`, "matrix" `[m, n]`: the epilogue, and its values.
EPILOGUES = {
    "bias": (E.bias, lambda y, b: y + b, ("row",)),
    "gelu": (E.gelu, lambda y, b: gelu(y + b), ("row",)),
    "residual": (E.residual, lambda y, r: y + r, ("matrix",)),
    "scale and residual": (
        lambda s, r: E.chain(E.scale(s), E.residual(r)),
        lambda y, s, r: y * s + r,
        ("column", "matrix"),
    ),
    "swiglu": (E.swiglu, lambda gate, up: silu(gate) * up, ()),
    "swiglu with biases": (
        E.swiglu,
        lambda gate, up, b, c: silu(gate + b) * (up + c),
        ("row", "row"),
    ),
}


@pytest.mark.gpu(2)
@pytest.mark.parametrize("name", EPILOGUES)
def test_epilogues_of_a_gather(name, mesh, scale) -> None:
    """As far from float64 as the rounding of the result, and a little for sums in float32.

    And for the activation's own error (`kernel_forms.ROUNDED`).
    """
    make, exact, kinds = EPILOGUES[name]
    count = 2 if name.startswith("swiglu") else 1
    _, k, n = scale.small
    m, n = 136 * mesh.size, n * mesh.size  # Fewer rows get narrow tiles, which hold no pair.
    shapes = {"row": (n,), "column": (m, 1), "matrix": (m, n)}
    specs = {"row": P("x"), "column": P(), "matrix": COLUMNS}
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((m, k)), cases.BF16)
    w = [jnp.asarray(rng.standard_normal((k, n)) / k**0.5, cases.BF16) for _ in range(count)]
    arrays = [jnp.asarray(rng.standard_normal(shapes[kind]), cases.BF16) for kind in kinds]

    def call(x, *rest):
        rhs, given = (rest[:2], rest[2:]) if count == 2 else (rest[0], rest[1:])
        return st.all_gather_matmul(x, rhs, "x", epilogue=make(*given), backend=scale.backend)

    in_specs = P("x"), *[COLUMNS] * count, *(specs[kind] for kind in kinds)
    program = jax.shard_map(call, mesh=mesh, in_specs=in_specs, out_specs=COLUMNS, check_vma=False)
    found = np.asarray(jax.jit(program)(x, *w, *arrays), np.float64)
    wide = functools.partial(np.asarray, dtype=np.float64)
    wanted = exact(*(wide(x) @ wide(y) for y in w), *map(wide, arrays))
    assert (np.abs(found - wanted) <= np.abs(wanted) * (2**-8 + 6e-4) + 1e-5).all()


@pytest.mark.gpu(2)
def test_a_matrix_loaded_along_the_contraction(mesh, scale) -> None:
    """Exact: whole numbers. A tile has nine stages, enough for pieces to come between them."""
    m, k, n = 72 * mesh.size, 9 * 64, 72 * mesh.size
    config = Config(tiles=TileConfig(num_stages=2, store_buffers=2))
    x, w, residual = (
        cases.whole_numbers(seed, *shape) for seed, shape in enumerate([(m, k), (k, n), (m, n)])
    )

    def call(x, w, residual):
        epilogue = E.residual(residual)
        return st.all_gather_matmul(
            x, w, "x", epilogue=epilogue, config=config, backend=scale.backend
        )

    in_specs = P("x"), COLUMNS, COLUMNS
    program = jax.shard_map(call, mesh=mesh, in_specs=in_specs, out_specs=COLUMNS, check_vma=False)
    found = jax.jit(program)(*(jnp.asarray(a, cases.BF16) for a in (x, w, residual)))
    wanted = jnp.asarray(x @ w + residual, cases.BF16)
    np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(wanted, np.float32))


@pytest.mark.gpu(2)
def test_a_residual_as_one_more_addend(mesh, scale) -> None:
    """Exact: rounded once."""
    m, k, n = 72 * mesh.size, 4 * 64, 72
    x, w, residual = (
        cases.whole_numbers(seed, *shape)
        for seed, shape in enumerate([(m, k * mesh.size), (k * mesh.size, n), (m, n)])
    )

    def call(x, w, residual):
        epilogue = E.residual(residual)
        return st.matmul_reduce_scatter(x, w, "x", epilogue=epilogue, backend=scale.backend)

    in_specs = COLUMNS, P("x"), P("x")
    program = jax.shard_map(call, mesh=mesh, in_specs=in_specs, out_specs=P("x"), check_vma=False)
    found = jax.jit(program)(*(jnp.asarray(a, cases.BF16) for a in (x, w, residual)))
    wanted = jnp.asarray(x @ w + residual, cases.BF16)
    np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(wanted, np.float32))


@pytest.mark.gpu(2)
@pytest.mark.parametrize("gathers", [True, False])
def test_batches_of_whole_tiles(gathers, mesh, scale) -> None:
    """Exact, and nothing but the kernel puts rows in order."""
    k, n = 16, 72
    batch = 2, (128 if scale.rehearsed else 512) * mesh.size
    lhs = jnp.asarray(cases.whole_numbers(0, *batch, k * (1 if gathers else mesh.size)), cases.BF16)
    rhs = cases.whole_numbers(1, lhs.shape[-1], n * (mesh.size if gathers else 1))
    name = "all_gather_matmul" if gathers else "matmul_reduce_scatter"
    in_specs, out = ((SEQUENCE, COLUMNS), BOTH) if gathers else ((BOTH, P("x")), SEQUENCE)
    call = functools.partial(getattr(st, name), axis_name="x", axis=1, backend=scale.backend)
    program = jax.shard_map(call, mesh=mesh, in_specs=in_specs, out_specs=out, check_vma=False)
    found = jax.jit(program)(lhs, jnp.asarray(rhs, cases.BF16))
    wanted = np.asarray(lhs, np.float32) @ rhs
    np.testing.assert_array_equal(np.asarray(found, np.float32), wanted)
