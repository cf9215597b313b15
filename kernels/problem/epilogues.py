"""Epilogues: that they are elementwise, and as a kernel can hold them.

A kernel applies an epilogue to pieces of the product, so each element of its result must depend on
the one element of the product alone.

Functions such as `jax.nn.relu` carry a rule for their derivative, an operation that Pallas does not
lower for GPUs (JAX 0.11.2 and 0.12.0.1). Inside a kernel nothing is differentiated, so the function
that the rule belongs to is put in its place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, Literal, Var

type Epilogue = Callable[[jax.Array], jax.Array]

# Operations that call a function, which their parameters hold under one of these names.
CALLS = {"custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr", "jit": "jaxpr"}
# Operations that keep the shape and yet mix elements.
MIXING = ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "sort", "rev")
# Stands for the product: two sizes that nothing else in an epilogue is likely to have.
EXAMPLE = (1013, 1019)


def check_elementwise(op: str, epilogue: Epilogue) -> None:
    """Raises ValueError unless `epilogue` maps each element of a matrix on its own."""
    example = jax.ShapeDtypeStruct(EXAMPLE, jnp.float32)
    traced = jax.make_jaxpr(epilogue)(example)
    shapes = [_shape(aval) for aval in traced.out_avals]
    mixing = "" if shapes == [EXAMPLE] else "its result has another shape"
    mixing = mixing or _what_mixes(traced.jaxpr)
    if mixing:
        name = getattr(epilogue, "__name__", repr(epilogue))
        raise ValueError(
            f"{op}: epilogue={name} must be elementwise, and {mixing}; it is applied to pieces of"
            " the product. Apply the function to the result instead."
        )


def _what_mixes(jaxpr: Jaxpr) -> str:
    """The operation in `jaxpr` that mixes elements of the product, in words; "" if none does."""
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name in CALLS:
            found = _what_mixes(equation.params[CALLS[name]].jaxpr)
            if found:
                return found
        takes = any(_shape(atom.aval) == EXAMPLE for atom in equation.invars)
        makes = all(_shape(var.aval) == EXAMPLE for var in equation.outvars)
        if takes and (name in MIXING or not makes):
            return f"{name} is not"
    return ""


def _shape(aval: Any) -> tuple[int, ...] | None:
    return getattr(aval, "shape", None)  # Tokens have none.


def without_derivatives(epilogue: Epilogue) -> Epilogue:
    """`epilogue`, of the same values, with every call in it replaced by what is called."""

    @functools.wraps(epilogue)
    def plain(x: jax.Array) -> jax.Array:
        traced = jax.make_jaxpr(epilogue)(x)
        (out,) = _evaluate(traced.jaxpr, traced.consts, [x])
        return out

    return plain


def _evaluate(jaxpr: Jaxpr, consts: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
    values: dict[Var, Any] = dict(
        zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *operands], strict=True)
    )

    def read(atom: Literal | Var) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for equation in jaxpr.eqns:
        inputs = [read(atom) for atom in equation.invars]
        if equation.primitive.name in CALLS:
            called = equation.params[CALLS[equation.primitive.name]]
            results = _evaluate(called.jaxpr, called.consts, inputs)
        else:
            params = equation.primitive.get_bind_params(equation.params)
            results = equation.primitive.bind(*inputs, **params)
            results = results if equation.primitive.multiple_results else [results]
        values.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]
