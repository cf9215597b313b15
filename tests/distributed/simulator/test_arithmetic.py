"""What kernels compute in registers is what JAX computes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed.simulator import simulate

FLOATS = {
    "exp": jnp.exp,
    "exp2": jnp.exp2,
    "expm1": jnp.expm1,
    "log": lambda x: jnp.log(jnp.abs(x) + 1),
    "log1p": lambda x: jnp.log1p(jnp.abs(x)),
    "tanh": jnp.tanh,
    "sin": jnp.sin,
    "cos": jnp.cos,
    "sqrt": lambda x: jnp.sqrt(jnp.abs(x)),
    "rsqrt": lambda x: lax.rsqrt(jnp.abs(x) + 1),
    "cbrt": jnp.cbrt,
    "logistic": jax.nn.sigmoid,
    "erf": lax.erf,
    "gelu": jax.nn.gelu,
    "silu": jax.nn.silu,
    "softmax": lambda x: jax.nn.softmax(x, axis=-1),
    "integer_pow": lambda x: x**3 + x**-2,
    "rem": lambda x: lax.rem(x, jnp.full_like(x, 0.7)),
    "floor": jnp.floor,
    "ceil": jnp.ceil,
    "round": jnp.round,
    "round_away": lambda x: lax.round(2.5 * jnp.sign(x), lax.RoundingMethod.AWAY_FROM_ZERO),
    "sign": jnp.sign,
    "clamp": lambda x: jnp.clip(x, -0.5, 0.5),
    "where": lambda x: jnp.where(x > 0, x, -2 * x),
    "finite": lambda x: jnp.isfinite(x / (x - x[0, 0])).astype(x.dtype),
    "to_int": lambda x: (x * 10).astype(jnp.int32).astype(x.dtype),
    "narrow": lambda x: lax.reduce_precision(x, 8, 7),
    "bits": lambda x: lax.bitcast_convert_type(
        lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32) ^ 1, jnp.float32
    ).astype(x.dtype),
    "sum": lambda x: jnp.broadcast_to(x.sum(axis=1, keepdims=True), x.shape),
    "max": lambda x: x - x.max(axis=0),
    "argmax": lambda x: jnp.broadcast_to(jnp.argmax(x, axis=1)[:, None], x.shape).astype(x.dtype),
    "cumsum": lambda x: jnp.cumsum(x, axis=1),
    "cummax_reverse": lambda x: lax.cummax(x, axis=1, reverse=True),
    "transpose": lambda x: x.T.reshape(x.shape),
    "flip": lambda x: lax.rev(x, (0, 1)),
    "concatenate": lambda x: jnp.concatenate([x[:, 4:], x[:, :4]], axis=1),
    "pad": lambda x: lax.pad(x[:, ::2], jnp.zeros((), x.dtype), ((0, 0, 0), (0, 1, 1))),
    "slice": lambda x: lax.dynamic_update_slice(x, lax.dynamic_slice(x, (1, 9), (2, 4)), (0, 3)),
    "matmul": lambda x: (x @ x.T) @ x,
    "batched": lambda x: jnp.einsum("ij,kj->ik", x, x)[:, :1] + x,
    "iota": lambda x: x + lax.broadcasted_iota(x.dtype, x.shape, 1),
    "loop": lambda x: lax.fori_loop(0, 3, lambda i, y: y * 0.5 + i.astype(y.dtype), x),
    "scan": lambda x: lax.scan(lambda c, row: (c + row, c * row), x[0] * 0, x)[1],
    "while": lambda x: lax.while_loop(lambda y: jnp.abs(y).max() > 0.1, lambda y: y / 2, x),
    "cond": lambda x: lax.cond(x[0, 0] > 0, lambda y: y + 1, lambda y: y - 1, x),
    "custom_jvp": lambda x: jax.nn.relu(x) + jax.nn.relu6(x),
}
INTEGERS = {
    "div": lambda x: lax.div(x, jnp.int32(7)) + lax.rem(x, jnp.int32(-7)),
    "floor_div": lambda x: x // 7 + x % 7,
    "by_zero": lambda x: lax.div(x, x * 0) + lax.rem(x, x * 0),
    "shifts": lambda x: (x << 3) ^ (x >> 2) | lax.shift_right_logical(x, jnp.full_like(x, 5)),
    "counts": lambda x: lax.population_count(x) + lax.clz(x),
    "wrap": lambda x: x * jnp.int32(123456789) + jnp.int32(2**31 - 1),
    "not": lambda x: ~x,
    "abs": lambda x: jnp.abs(x) + jnp.sign(x),
    "min": lambda x: jnp.minimum(x, x.min()),
    "bool": lambda x: ((x > 0) & (x % 2 == 0) | ~(x < 5)).astype(jnp.int32),
    "reduce_or": lambda x: x + jnp.any(x > 60).astype(jnp.int32) + jnp.all(x > 60),
}


def in_kernel(function, x):
    def body(x_ref, out_ref):
        out_ref[...] = function(x_ref[...])

    out = jax.eval_shape(function, x)
    with simulate():
        return plgpu.kernel(body, out_type=jax.ShapeDtypeStruct(out.shape, out.dtype))(x)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("name", FLOATS)
def test_floats(name, dtype):
    x = jax.random.normal(jax.random.key(0), (8, 16), dtype)
    got = np.asarray(in_kernel(FLOATS[name], x), np.float32)
    want = np.asarray(FLOATS[name](x.astype(jnp.float32)), np.float32)
    if dtype == jnp.float32:
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-5)
    elif name not in ("round", "floor", "ceil", "to_int", "bits", "rem", "argmax", "while"):
        # The same to a few roundings to 8 bits, of numbers up to the largest that occurs.
        np.testing.assert_allclose(got, want, atol=0.03 * max(np.abs(want).max(), 1))


@pytest.mark.parametrize("name", INTEGERS)
def test_integers(name):
    x = jnp.arange(-64, 64, dtype=jnp.int32).reshape(8, 16)
    np.testing.assert_array_equal(in_kernel(INTEGERS[name], x), INTEGERS[name](x))


@pytest.mark.parametrize("name", INTEGERS)
def test_integer_scalars(name):
    """Scalars take another way through the interpreter than arrays."""
    x = jnp.array([-2147483648, -65, -7, -1, 0, 1, 6, 62, 2147483647], jnp.int32)

    def one_by_one(v):
        return jnp.stack([INTEGERS[name](v[i]) for i in range(v.shape[0])])

    def body(x_ref, out_ref):
        for i in range(x.shape[0]):
            out_ref[i] = INTEGERS[name](x_ref[i])

    with simulate():
        got = plgpu.kernel(body, out_type=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)
    np.testing.assert_array_equal(got, one_by_one(x))
