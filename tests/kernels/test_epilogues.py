"""Epilogues without rules for derivatives: the same values."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stretto.kernels.problem import epilogues
from stretto.kernels.problem.epilogues import without_derivatives


def obstacle(epilogue):
    return epilogues.obstacle("op", epilogue, [(6, 8)], [jnp.float32])


FUNCTIONS = {
    "relu": jax.nn.relu,
    "gelu": jax.nn.gelu,
    "silu": jax.nn.silu,
    "softplus": jax.nn.softplus,
    "elu": jax.nn.elu,
    "relu6": jax.nn.relu6,
    "identity": lambda x: x,
    "a mask": lambda x: jnp.where(x > 0, x, 0.5 * x),
    "a table": lambda x: x * jnp.asarray([1.0, 2.0]).sum(),
    "a custom_vjp": jax.custom_vjp(lambda x: 3 * x + 1),
}
FUNCTIONS["a custom_vjp"].defvjp(lambda x: (3 * x + 1, None), lambda _, g: (3 * g,))


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("jitted", [False, True])
def test_values_are_kept_and_rules_are_not(name, jitted):
    function = FUNCTIONS[name]
    x = jnp.linspace(-4, 4, 48).reshape(6, 8)
    plain = without_derivatives(jax.jit(function) if jitted else function)
    np.testing.assert_array_equal(jax.jit(plain)(x), jax.jit(function)(x))
    assert "custom" not in str(jax.make_jaxpr(plain)(x))


def test_the_rule_was_there():
    assert "custom_jvp_call" in str(jax.make_jaxpr(jax.nn.relu)(jnp.zeros(2)))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_elementwise_functions_pass(name):
    for function in (FUNCTIONS[name], jax.jit(FUNCTIONS[name])):
        assert (obstacle(function) is None) == (name != "a table")


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (jax.nn.softmax, "reduce_max is not"),
        (jax.jit(jax.nn.softmax), "reduce_max is not"),
        (lambda x: x / x.max(), "reduce_max is not"),
        (lambda x: x.cumsum(axis=0), "cumsum is not"),
        (lambda x: x[::-1], "rev is not"),
        (lambda x: jnp.sort(x), "sort is not"),
        (lambda x: x.sum(), "its result has another shape"),
        (lambda x: x.T, "its result has another shape"),
        (lambda x: (x, x), "its result has another shape"),
    ],
)
def test_functions_that_mix_elements_are_refused(function, said):
    with pytest.raises(ValueError, match=f"op: epilogue=.* must be elementwise, and {said}"):
        obstacle(function)
