"""Forms of activations that cost a kernel less: as accurate as the type of the result needs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fused_cases import mesh_of
from jax import lax
from jax.sharding import PartitionSpec as P

import stretto as st
from stretto.kernels.operations import epilogues as named
from stretto.kernels.problem import epilogues, kernel_forms
from stretto.kernels.problem.epilogues import without_derivatives

BF16, F32 = jnp.bfloat16, jnp.float32
X = np.concatenate([np.linspace(-60, 60, 20001), np.geomspace(1e-30, 1, 500), [0.0]])
X = np.concatenate([X, -np.geomspace(1e-5, 4, 2000)]).astype(np.float32)


def exact_logistic(x):
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-x.astype(np.float64)))


def exponent_of_gelu(x):
    return 2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)


def exact_gelu(x):
    x = x.astype(np.float64)
    with np.errstate(over="ignore"):
        return x / (1 + np.exp(-exponent_of_gelu(x)))


EXACT = {"logistic": exact_logistic, "silu": lambda x: x * exact_logistic(x), "gelu": exact_gelu}
WRITTEN = {"logistic": lax.logistic, "silu": jax.nn.silu, "gelu": kernel_forms.gelu}


def values(name, forms, x=X):
    return np.asarray(jax.jit(without_derivatives(WRITTEN[name], forms))(x))


def relative(name, forms, x=X):
    want = EXACT[name](x)
    large = np.abs(want) > 1e-35
    return x[large], np.abs(values(name, forms, x).astype(np.float64) - want)[large] / np.abs(
        want[large]
    )


@pytest.mark.parametrize("name", EXACT)
def test_exact_forms_differ_by_the_rounding_of_float32(name):
    """In proportion to the exponent of the exponential, which is rounded."""
    x, error = relative(name, kernel_forms.EXACT)
    exponent = np.abs(exponent_of_gelu(x) if name == "gelu" else x)
    assert (error <= 2e-7 * (2 + exponent)).all()


@pytest.mark.parametrize("name", EXACT)
def test_exact_forms_round_to_the_nearest_of_16_bits(name):
    x = X[np.abs(X) < 5]
    for dtype in (BF16, jnp.float16):
        want = EXACT[name](x).astype(dtype).view(np.int16).astype(int)
        steps = np.abs(values(name, kernel_forms.EXACT, x).astype(dtype).view(np.int16) - want)
        assert steps.max() <= 1 and (steps > 0).mean() < 0.01


def test_the_rounded_gelu_is_within_the_rounding_of_bfloat16():
    """The result is next to the nearest one at most; most often it is the nearest."""
    x, found = relative("gelu", kernel_forms.ROUNDED, X[X >= -4])
    assert found[x >= -3].max() <= 6e-4 and found.max() <= 1.8e-3
    got = values("gelu", kernel_forms.ROUNDED, x).astype(BF16).view(np.int16).astype(int)
    steps = np.abs(got - exact_gelu(x).astype(BF16).view(np.int16))
    assert steps.max() <= 1 and (steps == 0).mean() > 0.96
    # After rounding no error is larger than that of the function as it is written.
    rounded, written = (
        np.abs(values("gelu", forms, X).astype(BF16).astype(np.float64) - exact_gelu(X)).max()
        for forms in (kernel_forms.ROUNDED, {})
    )
    assert rounded <= written


def test_far_below_zero_gelu_is_nearly_zero():
    x = np.linspace(-60, -4, 5000, dtype=np.float32)
    got = values("gelu", kernel_forms.ROUNDED, x)
    assert (got <= 0).all() and np.abs(got - exact_gelu(x)).max() < 1e-5


@pytest.mark.parametrize("name", EXACT)
def test_values_without_an_end(name):
    ends = np.array([np.inf, -np.inf, np.nan, 3e38, -3e38], np.float32)
    got, want = (values(name, forms, ends) for forms in (kernel_forms.EXACT, {}))
    np.testing.assert_array_equal(got, want)
    rounded = values(name, kernel_forms.ROUNDED, ends)
    kept = [0, 2, 3, 4]  # Of minus infinity JAX's `gelu` is no number; the form has the limit, 0.
    np.testing.assert_array_equal(rounded[kept], want[kept])


def test_forms_stand_where_functions_are_called():
    for function in (named.gelu().function, named.geglu().function, named.swiglu().function):
        xs = [X] * (1 if function is named.gelu().function else 2)
        traced = str(jax.make_jaxpr(without_derivatives(function, kernel_forms.EXACT))(*xs))
        assert "rsqrt" in traced and "tanh" not in traced and "logistic" not in traced
    # Another function of that name keeps what it does, and so do other types.

    @jax.jit
    def gelu(x):
        return 2 * jnp.tanh(x)

    for function, x in ((gelu, X), (jax.nn.silu, X.astype(jnp.float16))):
        traced = str(jax.make_jaxpr(without_derivatives(function, kernel_forms.EXACT))(x))
        assert "tanh" in traced or "logistic" in traced


@pytest.mark.parametrize("given", [jax.nn.gelu, "gelu", jax.jit(jax.nn.gelu)])
def test_gelu_of_jax_is_recognised(given):
    function = named.of("op", given).function
    assert epilogues.is_approximate(function, [F32], kernel_forms.EXACT)
    np.testing.assert_array_equal(jax.jit(function)(X), jax.jit(jax.nn.gelu)(X))


@pytest.mark.parametrize(
    ("function", "approximate"),
    [
        (jax.nn.silu, True),
        (lambda x: jax.nn.sigmoid(x) + 1, True),
        (jnp.tanh, False),
        (jax.nn.relu, False),
        (lambda x: jax.nn.silu(x) * jnp.exp(x), False),
        (lambda x: jax.nn.silu(x) * jax.jit(jnp.sqrt)(x), False),
    ],
)
def test_only_exponentials_of_forms_are_approximate(function, approximate):
    assert epilogues.is_approximate(function, [F32], kernel_forms.EXACT) == approximate
    assert not epilogues.is_approximate(function, [F32], {})


@pytest.mark.parametrize(("dtype", "has"), [(BF16, "exp2"), (F32, "rsqrt")])
def test_a_kernel_has_the_forms_for_its_result(dtype, has):
    def body(x, w):
        return st.all_gather_matmul(
            x, w, "x", epilogue="gelu", out_dtype=dtype, backend="simulator"
        )

    columns = P(None, "x")
    mapped = jax.shard_map(
        body, mesh=mesh_of(2), in_specs=(P("x"), columns), out_specs=columns, check_vma=False
    )
    with st.simulate(seed=0):
        text = str(jax.make_jaxpr(mapped)(jnp.ones((16, 16), BF16), jnp.ones((16, 16), BF16)))
    assert has in text and "tanh" not in text and "approx_math=True" in text
    assert ("rsqrt" in text) == (dtype == F32)
