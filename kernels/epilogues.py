"""Epilogues as a kernel can hold them: without rules for their derivatives.

Functions such as `jax.nn.relu` carry a rule for their derivative, an operation that Pallas does not
lower for GPUs (JAX 0.11.2 and 0.12.0.1). Inside a kernel nothing is differentiated, so the function
that the rule belongs to is put in its place.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import Jaxpr, Literal, Var

from stretto.kernels.reference import Epilogue

# Operations that call a function, which their parameters hold under one of these names.
CALLS = {"custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr", "jit": "jaxpr"}


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
