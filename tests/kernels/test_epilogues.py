"""Epilogues without rules for derivatives: the same values."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import stretto as st
from stretto.distributed.tools import aot
from stretto.kernels.problem import epilogues, lowered
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


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda x, y: x + y, "missing 1 required positional argument: 'y'"),
        (lambda x: x + "a", "unsupported operand type"),
        (lambda x: x if x.sum() > 0 else -x, "Attempted boolean conversion"),
    ],
)
def test_functions_that_fit_no_product_are_refused(function, said):
    with pytest.raises(ValueError, match=r"op: the epilogue .* applied to the product") as refused:
        obstacle(function)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("function", "lacking"),
    [
        (jax.nn.softplus, "log1p"),
        (jax.jit(jax.nn.elu), "expm1"),
        (lambda x: jax.nn.gelu(x, approximate=False), "copy, erfc"),
        (lambda x: x**2.5, "pow"),
        (lambda x: x**-2, "the power -2"),
        (lambda x: jnp.where(~(x > 0), x, 0), "not of bools"),
        (lambda x: lax.rem(x, 2.0), "rem of floats"),
        (lambda x: lax.cond(True, jnp.sin, jnp.tan, x), "tan"),
        (jax.checkpoint(jnp.sin), "remat2"),
    ],
)
def test_what_no_gpu_kernel_has_is_an_obstacle(function, lacking):
    said = lowered.obstacle("this", function, [jnp.float32])
    assert said == f"the epilogue this uses {lacking}, which XLA has and kernels lack."


def every_operation(x):
    """Of `lowered.LOWERED`, in the forms that are not refused."""
    y = jnp.abs(x) + jnp.exp2(jnp.sin(x)) - jnp.cos(x) / 3
    y = lax.clamp(-1.0, jnp.round(y), 1.0) * lax.logistic(x) + jnp.sign(y) * x**3
    y = jnp.sqrt(lax.square(y)) + lax.rsqrt(jnp.exp(y)) + jnp.log(jnp.log2(-y)) + jnp.tanh(y)
    y = lax.optimization_barrier(jnp.maximum(jnp.minimum(y, 2.0), -2.0))
    some = ((y > 0) & (y < 1)) | (y == 2) ^ (y != 3)
    y = jnp.where(some, y, jax.nn.relu(y) + jnp.zeros_like(y) + (y >= 1) + (y <= 0))
    n = lax.bitcast_convert_type(y, jnp.int32)
    n = ~lax.shift_left(n, jnp.int32(1)) ^ lax.shift_right_logical(n, jnp.int32(2)) & 7 | 1
    n = lax.rem(lax.shift_right_arithmetic(n, jnp.int32(1)), jnp.int32(5)) + lax.clz(n)
    y = lax.cond(True, jnp.sin, jnp.cos, y)
    return lax.scan(lambda y, _: (y * 0.5, None), y, length=2)[0] + n.astype(jnp.float32)


def test_every_operation_is_in_the_example():
    traced = jax.make_jaxpr(every_operation)(jnp.zeros((64, 64)))
    used = {eqn.primitive.name for eqn in lowered.equations(traced.jaxpr)}
    assert lowered.LOWERED - used == {"custom_vjp_call", "iota"}
    assert lowered.obstacle("this", every_operation, [jnp.float32]) is None


@pytest.mark.slow
@pytest.mark.skipif(not aot.is_available(), reason="needs the compiler: `uv sync --group aot`")
def test_kernels_have_all_others():
    mesh, whole = aot.mesh_of_gpus((2,), ("x",)), jax.ShapeDtypeStruct((256, 128), jnp.bfloat16)
    program = jax.shard_map(
        lambda x, w: st.all_gather_matmul(x, w, "x", epilogue=every_operation, backend="pallas"),
        mesh=mesh,
        in_specs=(P("x"), P()),
        out_specs=P(),
        check_vma=False,
    )
    weights = jax.ShapeDtypeStruct((128, 128), jnp.bfloat16)
    assert "mosaic_gpu" in jax.jit(program).lower(whole, weights).as_text()
