"""Epilogues: that they are elementwise, and as a kernel can hold them.

A kernel applies an epilogue to pieces of the product, so each element of its result must depend on
the one element of the product alone, and on those of the epilogue's arrays beside it.

Functions such as `jax.nn.relu` carry a rule for their derivative, an operation that Pallas does not
lower for GPUs (JAX 0.11.2 and 0.12.0.1). Inside a kernel nothing is differentiated, so the function
that the rule belongs to is put in its place.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import Jaxpr, Literal, Var

from stretto.kernels.problem.kernel_forms import form_of

type Function = Callable[..., jax.Array]
type Forms = Mapping[str, Function]

# Operations that call a function, which their parameters hold under one of these names.
CALLS = {"custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr", "jit": "jaxpr"}
# Operations that `approx_math` makes less accurate (Mosaic GPU, JAX 0.11.2).
APPROXIMATED = {"cos", "exp", "exp2", "log", "log2", "logistic", "rsqrt", "sin", "sqrt", "tanh"}
AS_WRITTEN: Forms = MappingProxyType({})
# Operations that keep the shape and yet mix elements.
MIXING = ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "sort", "rev")
# Stand for the product: sizes that nothing else in an epilogue is likely to have.
EXAMPLE = (1013, 1019)
OTHER_EXAMPLE = (1021, 1031)


def obstacle(
    op: str,
    epilogue: Function,
    products: Sequence[tuple[int, ...]],
    dtypes: Sequence[jax.typing.DTypeLike],
) -> str | None:
    """Why no kernel can hold `epilogue`, None where one can.

    Args:
      op: the operation's name, for errors.
      epilogue: the caller's function.
      products: shapes of the results that it is applied to.
      dtypes: of what it takes: the product before it is rounded, or two, and the arrays.

    Raises:
      ValueError: it does not map each element on its own, or does not take so many arrays.
    """
    try:
        traced = _trace(epilogue, EXAMPLE, dtypes)
    except (TypeError, ValueError, IndexError) as error:
        if len(dtypes) > 1:
            raise ValueError(
                f"{op}: the epilogue {name_of(epilogue)} cannot be applied to {len(dtypes)}"
                f" matrices of one shape, the product and the arrays: {error}"
            ) from error
        for shape in products:  # It fits the shapes of these results, or none.
            try:
                fitting = _trace(epilogue, shape, dtypes)
            except (TypeError, ValueError, IndexError) as refused:
                raise ValueError(
                    f"{op}: the epilogue {name_of(epilogue)} cannot be applied to the product, an"
                    f" array of shape {shape}: {refused}"
                ) from refused
            _check(op, epilogue, fitting, shape)
        return (
            f"the epilogue {name_of(epilogue)} fits results of shape {products[0]} only, and a"
            " kernel applies it to pieces: it uses an array from outside. Pass the array beside the"
            " function: epilogue=(function, array)."
        )
    _check(op, epilogue, traced, EXAMPLE)
    for const in constants(traced):
        if isinstance(const, Tracer):
            return f"the epilogue {name_of(epilogue)} uses a traced value from outside."
        if _shape(const):
            return f"the epilogue {name_of(epilogue)} uses an array from outside."
    numbers = list(_numbers(traced))
    if numbers != list(_numbers(_trace(epilogue, OTHER_EXAMPLE, dtypes))):
        return (
            f"the epilogue {name_of(epilogue)} depends on the size of the result or on the place in"
            " it, and a kernel applies it to pieces."
        )
    return None


def _numbers(traced: Any) -> Iterator[Any]:
    """The numbers in a traced function, and what counts places in the product."""
    for equation in traced.jaxpr.eqns:
        name = equation.primitive.name
        if name in CALLS:
            yield from _numbers(equation.params[CALLS[name]])
        elif name == "iota":
            yield equation.params["shape"]
        yield from (x.val for x in equation.invars if isinstance(x, Literal))


def constants(traced: Any) -> Iterator[Any]:
    """What a traced function uses from outside, and what the functions do that it calls."""
    yield from traced.consts
    for equation in traced.jaxpr.eqns:
        if equation.primitive.name in CALLS:
            yield from constants(equation.params[CALLS[equation.primitive.name]])


def _trace(
    epilogue: Function, shape: tuple[int, ...], dtypes: Sequence[jax.typing.DTypeLike]
) -> Any:
    return jax.make_jaxpr(epilogue)(*(jax.ShapeDtypeStruct(shape, dtype) for dtype in dtypes))


def _check(op: str, epilogue: Function, traced: Any, shape: tuple[int, ...]) -> None:
    """Raises ValueError unless `epilogue`, traced for products of a shape, is elementwise."""
    if mixing := _mixing(traced, shape):
        raise ValueError(
            f"{op}: epilogue={name_of(epilogue)} must be elementwise, and {mixing}; it is applied"
            " to pieces of the product. Apply the function to the result instead."
        )


def mixing(function: Function, shape: tuple[int, ...], *dtypes: jax.typing.DTypeLike) -> str:
    """What in a function mixes elements, in words; "" if each is mapped on its own.

    It takes an array for each of `dtypes`, all of one shape, and is traced for another one than
    `shape`, unless it fits that one only.
    """
    try:
        return _mixing(_trace(function, EXAMPLE, dtypes), EXAMPLE)
    except (TypeError, ValueError, IndexError):
        return _mixing(_trace(function, shape, dtypes), shape)


def _mixing(traced: Any, shape: tuple[int, ...]) -> str:
    if [_shape(aval) for aval in traced.out_avals] != [shape]:
        return "its result has another shape"
    return _what_mixes(traced.jaxpr, shape, traced.jaxpr.invars)


def name_of(epilogue: Function) -> str:
    """What errors call it."""
    return getattr(epilogue, "__name__", repr(epilogue))


def _what_mixes(jaxpr: Jaxpr, product: tuple[int, ...], inputs: Iterable[Var]) -> str:
    """The operation in `jaxpr` that mixes elements of the product, in words; "" if none does.

    `inputs` are those of its variables that depend on the product.
    """
    depending = set(inputs)
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        takes = [isinstance(x, Var) and x in depending for x in equation.invars]
        if not any(takes):
            continue
        if name in CALLS:
            called = equation.params[CALLS[name]].jaxpr
            inner = itertools.compress(called.invars, takes)
            if found := _what_mixes(called, product, inner):
                return found
        elif name in MIXING or any(_shape(var.aval) != product for var in equation.outvars):
            return f"{name} is not"
        depending.update(equation.outvars)
    return ""


def _shape(aval: Any) -> tuple[int, ...] | None:
    return getattr(aval, "shape", None)  # Tokens have none.


def without_derivatives(epilogue: Function, forms: Forms = AS_WRITTEN) -> Function:
    """`epilogue`, of the same values, with every call in it replaced by what is called.

    And with activations in `forms` (`kernel_forms`), whose values are the same but for rounding.
    """

    @functools.wraps(epilogue)
    def plain(*xs: jax.Array) -> jax.Array:
        traced = jax.make_jaxpr(epilogue)(*xs)
        (out,) = _evaluate(traced.jaxpr, traced.consts, xs, forms)
        return out

    return plain


def is_approximate(
    epilogue: Function, dtypes: Sequence[jax.typing.DTypeLike], forms: Forms
) -> bool:
    """Whether `epilogue` has activations in `forms`, and nothing else that `approx_math` changes.

    `dtypes` are of what it takes.
    """
    found = set(_taken(_trace(epilogue, EXAMPLE, dtypes).jaxpr, forms))
    return "a form" in found and not found & APPROXIMATED


def is_sum(epilogue: Function) -> bool:
    """Whether `epilogue` adds one array to the product, and does nothing else."""
    traced = _trace(epilogue, EXAMPLE, [jnp.float32] * 2)
    names = [equation.primitive.name for equation in traced.jaxpr.eqns]
    return names == ["add"] and {*traced.jaxpr.eqns[0].invars} == {*traced.jaxpr.invars}


def _taken(jaxpr: Jaxpr, forms: Forms) -> Iterator[str]:
    """The names of operations that stay in a function, and "a form" for what a form replaces."""
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if form_of(equation, forms) is not None:
            yield "a form"
        elif name in CALLS:
            yield from _taken(equation.params[CALLS[name]].jaxpr, forms)
        else:
            yield name


def _evaluate(
    jaxpr: Jaxpr, consts: Sequence[Any], operands: Sequence[Any], forms: Forms
) -> list[Any]:
    numbers = map(_as_number, consts)
    values: dict[Var, Any] = dict(
        zip([*jaxpr.constvars, *jaxpr.invars], [*numbers, *operands], strict=True)
    )

    def read(atom: Literal | Var) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for equation in jaxpr.eqns:
        inputs = [read(atom) for atom in equation.invars]
        if (form := form_of(equation, forms)) is not None:
            results = [form(*inputs)]
        elif equation.primitive.name in CALLS:
            called = equation.params[CALLS[equation.primitive.name]]
            results = _evaluate(called.jaxpr, called.consts, inputs, forms)
        else:
            params = equation.primitive.get_bind_params(equation.params)
            results = equation.primitive.bind(*inputs, **params)
            results = results if equation.primitive.multiple_results else [results]
        values.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _as_number(const: Any) -> Any:
    """A scalar array as the number that it holds: kernels take no arrays from outside."""
    return np.asarray(const)[()] if isinstance(const, jax.Array) else const
