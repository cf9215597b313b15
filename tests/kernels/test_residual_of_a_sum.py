"""A residual that the kernel adds to a sum over devices, as one more addend."""

from __future__ import annotations

import dataclasses

import fused_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import stretto as st
from stretto.kernels.choice import choose
from stretto.kernels.engine.hopper.tile_config import NARROW
from stretto.kernels.fused import beside
from stretto.kernels.fused.matmul_reduce_scatter import Config
from stretto.kernels.problem.epilogue import Form
from stretto.kernels.problem.options import MatmulOptions

BF16, F32 = jnp.bfloat16, jnp.float32
CONFIG = Config(tiles=dataclasses.replace(NARROW, num_stages=2))
K, N = 3 * 64, 136  # Of a device; the second tile of columns is not full.


def draw(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(cases.whole_numbers(seed, *shape), BF16)


def added(rows: tuple[int, ...], axis: int, devices: int = 2, epilogue=st.epilogues.residual):
    """What the kernel returns, what it should, and what its choice says."""
    x, w = draw(0, *rows, devices * K), draw(1, devices * K, N)
    residual = draw(2, *rows, N)
    scattered = P(*[None] * axis, "x")
    lhs = P(*[None] * len(rows), "x")

    def body(x, w, residual):
        return st.matmul_reduce_scatter(
            x, w, "x", axis=axis, epilogue=epilogue(residual), config=CONFIG, backend="simulator"
        )

    mapped = jax.shard_map(
        body,
        mesh=cases.mesh_of(devices),
        in_specs=(lhs, P("x"), scattered),
        out_specs=scattered,
        check_vma=False,
    )
    with choose.recorded() as choices, st.simulate(seed=1, core_count=2):
        found = np.asarray(jax.jit(mapped)(x, w, residual), np.float32)
    wanted = jnp.asarray(x.astype(F32) @ w.astype(F32) + residual, BF16)
    return found, np.asarray(wanted, np.float32), str(choices[0])


@pytest.fixture(autouse=True)
def fresh():
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.parametrize(
    ("rows", "axis", "devices"),
    [
        ((2 * 136,), 0, 2),
        pytest.param((3 * 136,), 0, 3, marks=pytest.mark.slow),
        pytest.param((2, 2 * 128), 1, 2, marks=pytest.mark.slow),  # The kernel orders rows.
        pytest.param((3, 2 * 24), 1, 2, marks=pytest.mark.slow),  # XLA does.
    ],
)
def test_it_is_rounded_once(rows, axis, devices):
    """Whole numbers, of which those above 256 are not all numbers in bfloat16."""
    found, wanted, said = added(rows, axis, devices)
    np.testing.assert_array_equal(found, wanted)
    assert "the kernel applies the epilogue" in said


@pytest.mark.slow
def test_what_is_no_sum_is_left_to_xla():
    found, wanted, said = added((2 * 136,), 0, epilogue=lambda r: st.Epilogue(jnp.subtract, -r))
    np.testing.assert_allclose(found, wanted, rtol=2**-7)
    assert "XLA applies the epilogue" in said


def test_what_the_kernel_adds():
    def why(function=jnp.add, config=CONFIG, arrays=None):
        options = MatmulOptions(out_dtype=jnp.dtype(BF16), epilogue=Form(function))
        return beside.left_of_a_sum(config, options, arrays or [("elements", BF16)])

    assert why() is None and why(lambda y, r: r + y) is None
    assert "follows a sum" in str(why(config=dataclasses.replace(CONFIG, unfused=True)))
    for other in (jnp.multiply, lambda y, r: y + y + r, lambda y, r: y + y, lambda y, r: y):
        assert "more than one array" in str(why(other))
    assert "more than one array" in str(why(arrays=[("columns", BF16)]))
    assert "float32 and the result bfloat16" in str(why(arrays=[("elements", F32)]))
