"""Forms of operations that cost a kernel less: as accurate as a result of 16 bits needs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import stretto as st
from stretto.kernels.problem import kernel_forms
from stretto.kernels.problem.epilogues import without_derivatives

X = np.concatenate([np.linspace(-90, 90, 20001), np.geomspace(1e-30, 1, 500), [0.0]])
X = X.astype(np.float32)


def exact_logistic(x):
    return 1 / (1 + np.exp(-x.astype(np.float64)))


def exact_gelu(x):
    x = x.astype(np.float64)
    return x / (1 + np.exp(-2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


EXACT = {"logistic": exact_logistic, "silu": lambda x: x * exact_logistic(x), "gelu": exact_gelu}
OURS = {
    "logistic": lax.logistic,
    "silu": st.epilogues.silu().function,
    "gelu": st.epilogues.gelu().function,
}


@pytest.mark.parametrize("name", EXACT)
def test_relative_error(name):
    """In proportion to the exponent of `exp`; but for results below 1e-35, which may become 0."""
    got = np.asarray(jax.jit(without_derivatives(OURS[name]))(X), np.float64)
    with np.errstate(over="ignore"):
        want = EXACT[name](X)
    large = np.abs(want) > 1e-35
    error, x = np.abs(got - want)[large] / np.abs(want[large]), np.abs(X[large])
    exponent = 1.6 * (x + 0.045 * x**3) if name == "gelu" else x
    assert (error <= 1.5e-7 * (2 + exponent)).all()
    assert np.abs(got - want)[~large].max() <= 1e-35


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_rounded_results(name, dtype):
    """Nearly always the correctly rounded ones, and next to those otherwise."""
    x = X[np.abs(X) < 8]
    got = jax.jit(without_derivatives(OURS[name]))(x).astype(dtype)
    want = EXACT[name](x).astype(dtype)
    steps = np.abs(np.asarray(got).view(np.int16).astype(int) - want.view(np.int16).astype(int))
    assert steps.max() <= 1 and (steps > 0).mean() < 0.01


@pytest.mark.parametrize("name", EXACT)
def test_values_without_an_end(name):
    ends = jnp.array([jnp.inf, -jnp.inf, jnp.nan, 3e38, -3e38], jnp.float32)
    plain = {"logistic": lax.logistic, "silu": jax.nn.silu, "gelu": jax.nn.gelu}[name]
    got = jax.jit(without_derivatives(OURS[name]))(ends)
    np.testing.assert_array_equal(got, jax.jit(plain)(ends))


def test_forms_are_in_the_function_that_a_kernel_gets():
    traced = jax.make_jaxpr(without_derivatives(st.epilogues.swiglu().function))(X, X)
    assert "logistic" not in str(traced) and "rsqrt" in str(traced)
    assert set(kernel_forms.FORMS) == {"logistic"}


def test_other_types_keep_their_operation():
    half = jnp.ones(8, jnp.bfloat16)
    assert "logistic" in str(jax.make_jaxpr(without_derivatives(lax.logistic))(half))


@pytest.mark.parametrize("given", [jax.nn.gelu, "gelu"])
def test_gelu_of_jax_is_that_of_the_epilogues(given):
    ours = st.kernels.operations.epilogues.of("op", given)
    assert ours.function is st.epilogues.gelu().function
    x = jnp.linspace(-3, 3, 101)
    np.testing.assert_allclose(ours.function(x), jax.nn.gelu(x), atol=1e-6)
    slopes = (jax.vmap(jax.grad(f))(x) for f in (ours.function, jax.nn.gelu))
    np.testing.assert_allclose(*slopes, atol=1e-6)
