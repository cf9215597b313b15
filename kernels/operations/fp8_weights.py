"""Weights of `stretto.fp8`: as the optimiser has them, or in 8 bits and transposed, made once.

The latter are what `Recipe.weight` returns, for weights that do not change; products with them have
no derivative.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from stretto.kernels.operations.fp8_products import Recipe
from stretto.kernels.operations.scaled import without_derivative
from stretto.kernels.problem import checks
from stretto.kernels.xla.quantisation import Quantised

type Weight = jax.Array | Quantised

GIVE = "give the weights themselves, not values in 8 bits and scales"


def as_sides(op: str, name: str, w: Any) -> tuple[tuple[Weight, ...], bool]:
    """One weight or several as a tuple, and whether there are several.

    Raises:
      ValueError: an empty tuple.
    """
    if isinstance(w, Quantised) or not isinstance(w, tuple | list):
        return (w,), False
    if not w:
        raise ValueError(f"{op}: {name} is empty; pass a matrix or a tuple of matrices.")
    return tuple(w), True


def like(op: str, name: str, w: Any, dtype: Any) -> jax.ShapeDtypeStruct:
    """What `w` is as `[..., in, out]` in `dtype`: of one in 8 bits without scales, not transposed.

    Raises:
      ValueError: it is no array, or of no floating-point type.
    """
    is_quantised = isinstance(w, Quantised)
    values = w.qvalue if is_quantised else w
    checks.check_array(op, name, values)
    if not jnp.issubdtype(values.dtype, jnp.floating):
        raise ValueError(f"{op}: {name} is {values.dtype}; it must be floating-point. Cast it.")
    shape = values.shape
    if is_quantised and len(shape) > 1:
        shape = (*shape[:-2], shape[-1], shape[-2])
    return jax.ShapeDtypeStruct(shape, dtype)


def in_8_bits(op: str, ws: Mapping[str, Any]) -> bool:
    """Whether the weights, by their names, are in 8 bits with scales.

    Raises:
      ValueError: some are and others are not.
    """
    found = {isinstance(w, Quantised) for each in ws.values() for w in each}
    if len(found) > 1:
        raise ValueError(
            f"{op}: some of {' and '.join(ws)} are in 8 bits with scales and others not; pass"
            " recipe.weight(w) for each, or for none."
        )
    return found.pop()


def as_quantised(recipe: Recipe, w: Weight) -> Quantised:
    """The weight in 8 bits and transposed, given so or made so."""
    return w if isinstance(w, Quantised) else recipe.weight(w)


def once(op: str, run: Callable[[Any], Any], operands: tuple) -> Any:
    """`run(operands)` of weights in 8 bits, which refuses to be differentiated."""
    return without_derivative(op, run, operands, instead=GIVE)
