"""Activations in forms that cost a kernel less arithmetic than those in which JAX writes them.

Tensor cores wait while an epilogue calculates, so its instructions are time: those that are issued,
and those of the unit for special functions (exponentials, roots, reciprocals), which takes eight
times as long for each. Compiled for an H100 (JAX 0.11.2), an element takes, in brackets of that unit:

| function | as JAX writes it | `EXACT` | `ROUNDED` |
|---|---|---|---|
| `gelu` | 22 (2) | 8 (2) | 8 (1) |
| `silu` | 17 (2) | 6 (2) | the same |
| `logistic` | 16 (2) | 5 (2) | the same |

- `EXACT` forms differ from the functions by the rounding of float32 alone. Of `gelu` they keep the
  digits of small results, which cancel in `1 + tanh(u)`.
- `ROUNDED` forms are for results in bfloat16, which rounds by up to `3.9e-3` of them: the error of
  `gelu` is at most `6e-4` of the result down to -3, and `1.7e-3` to -4. Below -4, where `gelu` is
  nearer to 0 than `1.3e-4`, it is at most `1e-5` in itself.

The exponentials are those of the unit alone, without a range reduction: a kernel is compiled with
`approx_math` where its epilogue has no other (`epilogues.is_approximate`).
"""  # noqa: E501

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

type Function = Callable[..., jax.Array]

LOG2_E = math.log2(math.e)
GELU_SCALE, GELU_CUBIC = math.sqrt(2 / math.pi), 0.044715  # Of `jax.nn.gelu`'s tanh.


@jax.jit
def gelu(x: jax.Array) -> jax.Array:
    """`jax.nn.gelu(x)`, as one call of a function that is recognised by its name."""
    return jax.nn.gelu(x)


# --- Exact: 1 / (1 + e) is the square of a reciprocal root, without a division --------------


def _exact_logistic(x: jax.Array) -> jax.Array:
    root = lax.rsqrt(1 + jnp.exp2(-LOG2_E * x))
    return root * root


def _exact_silu(x: jax.Array) -> jax.Array:
    root = lax.rsqrt(1 + jnp.exp2(-LOG2_E * x))
    return x * (root * root)


def _exact_gelu(x: jax.Array) -> jax.Array:
    """`x / (1 + exp(-2 u))` for `x * (1 + tanh(u)) / 2`."""
    scale = -2 * GELU_SCALE * LOG2_E
    root = lax.rsqrt(1 + jnp.exp2(x * (scale + scale * GELU_CUBIC * (x * x))))
    return x * (root * root)


# --- Rounded: max(x, 0) less what the function lacks there, which is even, by one exponential --


def _rounded_gelu(x: jax.Array) -> jax.Array:
    """`max(x, 0) - |x| / (1 + exp(2 |u|))`, the fraction as `2^-h(|x|)`, with a polynomial for h.

    Fitted to the least maximum of the relative error, for |x| to 5; beyond, h grows on.
    """
    a = jnp.abs(x)
    v = (0.023160591 * a + 0.051495254) * a + 0.32771535
    power = 5.5518099 - (v * a + 19.99492) * v
    # Infinity times the 0 that the fraction is there would be no number.
    return jnp.maximum(x, 0) - jnp.minimum(a, 1e4) * jnp.exp2(power)


EXACT: Mapping[str, Function] = MappingProxyType(
    {"gelu": _exact_gelu, "silu": _exact_silu, "logistic": _exact_logistic}
)
ROUNDED: Mapping[str, Function] = MappingProxyType({**EXACT, "gelu": _rounded_gelu})
WRITTEN: Mapping[str, Function] = MappingProxyType({"gelu": gelu, "silu": jax.nn.silu})
"""Functions that are recognised where they are called, by name and by what they do."""


def forms_for(out: jax.typing.DTypeLike) -> Mapping[str, Function]:
    """The forms, by name, of activations whose results have type `out`."""
    return ROUNDED if jnp.dtype(out) == jnp.bfloat16 else EXACT


def form_of(equation: Any, forms: Mapping[str, Function]) -> Function | None:
    """The form of an operation, or of a function that is called; None where it has none."""
    if any(x.aval.dtype != jnp.float32 for x in equation.invars):
        return None
    name = equation.primitive.name
    if name != "jit":
        return None if name in WRITTEN else forms.get(name)
    name = equation.params["name"]
    if name not in WRITTEN or name not in forms or len(equation.invars) != 1:
        return None
    does = str(equation.params["jaxpr"].jaxpr)
    return forms[name] if does == _text(name, equation.invars[0].aval.shape) else None


@functools.cache
def _text(name: str, shape: tuple[int, ...]) -> str:
    """What a function of `WRITTEN` does with float32 of a shape."""
    traced = jax.make_jaxpr(WRITTEN[name])(jax.ShapeDtypeStruct(shape, jnp.float32))
    (call,) = traced.jaxpr.eqns
    return str(call.params["jaxpr"].jaxpr)
