"""A layer's two products on one device: into the features that a team splits, and out of them.

    columns    [..., tokens / D, in]  ->  [..., tokens, out / D]    tokens are gathered
    rows       [..., tokens, in / D]  ->  [..., tokens / D, out]    sums are scattered

Without `sequence_parallel` tokens stay whole on every device, and the sums are reduced on all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from stretto.kernels.operations import epilogues, fp8, matmuls
from stretto.kernels.problem.epilogue import Epilogue, Form
from stretto.kernels.problem.epilogues import Function, mixing, name_of
from stretto.kernels.problem.promotion import by_default_rules
from stretto.kernels.xla.matmul import matmul
from stretto.layers.parallel import Parallel

type Promote = Callable[..., tuple]


class Affine(NamedTuple):
    """Arrays of a linear layer, or their stand-ins: kernel `[in, out]`, bias `[out]`."""

    kernel: Any
    bias: Any | None


class Types(NamedTuple):
    """Types of a linear layer, as `nnx.Linear` has them.

    Attributes:
      dtype: of the operands; by default the one that they promote to.
      out_dtype: of the result; by default the operands'.
      promote: converts operands, with `dtype=`.
    """

    dtype: jax.typing.DTypeLike | None
    out_dtype: jax.typing.DTypeLike | None
    promote: Promote


@by_default_rules
def columns(
    how: Parallel | None,
    x: jax.Array,
    weights: Sequence[Affine],
    types: Types,
    activation: Function | None = None,
) -> tuple[jax.Array, ...]:
    """`activation(all_gather(x) @ kernel + bias)`, for each of the weights; one gather serves all.

    Args:
      how: the sharding of the layer; None without a team.
      x: `[..., tokens / D, in]`.
      weights: each with a kernel `[in, out / D]` and a bias `[out / D]`.
      types: of operands and results.
      activation: elementwise. The operation applies it if there are no biases; else it applies
        these, and the sum is what the derivative of the activation keeps.

    Raises:
      ValueError: the activation mixes elements, and a team has some of the features each.
    """
    x, kernels, biases = _promoted(x, weights, types)
    in_8_bits = how is not None and how.fp8 is not None
    inside = None if in_8_bits else _inside(biases, activation)
    if how is not None and how.fp8 is not None:
        products = _columns_in_8_bits(how, how.fp8, x, kernels, types)
    elif how is None or not how.sequence_parallel:
        products = _products(x, kernels, types, inside)
    else:
        products = matmuls.all_gather_matmul(
            x,
            kernels,
            how.axis_name,
            axis=how.tokens_of(x),
            epilogue=inside,
            out_dtype=types.out_dtype,
            keep_gathered=how.keep_gathered,
            backend=how.backend,
        )
    products = tuple(checkpoint_name(product, "product") for product in products)
    left = biases if in_8_bits else [None] * len(biases)
    outside = activation if in_8_bits or any(bias is not None for bias in biases) else None
    if how is not None and activation is not None:
        check_activation(activation, products[0])
    pairs = zip(products, left, strict=True)
    return tuple(_finished(product, bias, outside) for product, bias in pairs)


@by_default_rules
def gated(
    how: Parallel | None,
    x: jax.Array,
    gate: Affine,
    up: Affine,
    types: Types,
    activation: Function,
) -> jax.Array:
    """`activation(all_gather(x) @ gate + its bias) * (all_gather(x) @ up + its bias)`."""
    opening, passing = columns(how, x, [gate, up], types)
    if how is not None:
        check_activation(activation, opening)
    return activation(opening) * passing


def check_callable(name: str, given: Any, example: str) -> None:
    """Raises ValueError where a layer's argument is no function, such as the name of one."""
    if not callable(given):
        raise ValueError(
            f"{name}={given!r} is of type {type(given).__name__}; pass a function, such as"
            f" {example}."
        )


def check_activation(activation: Function, product: jax.Array) -> None:
    """Raises ValueError where an activation does not map each element on its own."""
    if found := mixing(activation, product.shape, product.dtype):
        raise ValueError(
            f"activation={name_of(activation)} must be elementwise, and {found}: each device has"
            " some of the hidden features. Apply such a function to the layer's result, or between"
            " layers of nnx.Linear."
        )


@by_default_rules
def rows(how: Parallel | None, x: jax.Array, weight: Affine, types: Types) -> jax.Array:
    """`reduce_scatter(x @ kernel) + bias`; all-reduced without `sequence_parallel`.

    Args:
      how: the sharding of the layer; None without a team.
      x: `[..., tokens, in / D]`.
      weight: kernel `[in / D, out]`, and a bias `[out]` that every device has.
      types: of operands and result.
    """
    x, (kernel,), (bias,) = _promoted(x, [weight], types)
    inside = _inside([bias], None)
    if how is None:
        return _products(x, [kernel], types, inside)[0]
    if how.fp8 is not None:
        return _finished(_rows_in_8_bits(how, how.fp8, x, kernel, types), bias, None)
    options: dict[str, Any] = dict(epilogue=inside, out_dtype=types.out_dtype, backend=how.backend)
    if how.sequence_parallel:
        axis = how.tokens_of(x)
        return matmuls.matmul_reduce_scatter(x, kernel, how.axis_name, axis=axis, **options)
    return matmuls.matmul_all_reduce(x, kernel, how.axis_name, **options)


def _columns_in_8_bits(
    how: Parallel, recipe: fp8.Recipe, x: jax.Array, kernels: Sequence[jax.Array], types: Types
) -> tuple[jax.Array, ...]:
    if not how.sequence_parallel:
        out_dtype = types.out_dtype
        return tuple(fp8.matmul(x, w, recipe=recipe, out_dtype=out_dtype) for w in kernels)
    return fp8.all_gather_matmul(
        x,
        tuple(kernels),
        how.axis_name,
        recipe=recipe,
        axis=how.tokens_of(x),
        out_dtype=types.out_dtype,
        backend=how.backend,
    )


def _rows_in_8_bits(
    how: Parallel, recipe: fp8.Recipe, x: jax.Array, kernel: jax.Array, types: Types
) -> jax.Array:
    options: dict[str, Any] = dict(recipe=recipe, out_dtype=types.out_dtype, backend=how.backend)
    if how.sequence_parallel:
        axis = how.tokens_of(x)
        return fp8.matmul_reduce_scatter(x, kernel, how.axis_name, axis=axis, **options)
    return fp8.matmul_all_reduce(x, kernel, how.axis_name, **options)


def _promoted(
    x: jax.Array, weights: Sequence[Affine], types: Types
) -> tuple[jax.Array, tuple[jax.Array, ...], tuple[jax.Array | None, ...]]:
    kernels, biases = zip(*weights, strict=True)
    found = types.promote((x, *kernels, *biases), dtype=types.dtype)
    return found[0], found[1 : 1 + len(kernels)], found[1 + len(kernels) :]


def _inside(biases: Sequence[jax.Array | None], activation: Function | None) -> Epilogue | None:
    """What the operation applies to its products: their biases or, without any, the activation."""
    if all(bias is None for bias in biases):
        return None if activation is None else epilogues.of("activation", activation)
    zeros = (jnp.zeros(()) if bias is None else bias for bias in biases)
    return epilogues.bias(tuple(zeros) if len(biases) > 1 else next(zeros))


def _products(
    x: jax.Array, kernels: Sequence[jax.Array], types: Types, epilogue: Epilogue | None
) -> tuple[jax.Array, ...]:
    """As of `all_gather_matmul`, without a gather: each rounded once, after the epilogue."""
    wide = tuple(matmul(x, kernel) for kernel in kernels)
    if epilogue is not None:
        wide = Form(epilogue.function).results(wide, epilogue.arrays)
    return tuple(product.astype(types.out_dtype or x.dtype) for product in wide)


def _finished(product: jax.Array, bias: jax.Array | None, activation: Function | None) -> jax.Array:
    """The bias and the activation after a product, where its operation does not apply them."""
    product = product if bias is None else product + bias
    return product if activation is None else activation(product)
