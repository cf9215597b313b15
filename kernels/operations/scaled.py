"""What the matmuls of operands in 8 bits with scales have in common.

The public functions go to `scaled_gather`, `scaled_sums` and `scaled_groups` where a scale is given. The
products are not differentiable, since rounding to 8 bits has no derivative of use: `stretto.fp8`
differentiates what it quantises itself.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from stretto.kernels.operation import Axes, Operation
from stretto.kernels.operations.perform import typed_alike
from stretto.kernels.problem import scales

type Records = Mapping[scales.Granularity, Operation]
"""Of one operation, by the granularity of the scales."""

NOT_K_MAJOR = (
    "rhs in 8 bits is multiplied along its rows (K-major): pass it as [n, k] with"
    " rhs_transposed=True, a copy that is made once, where the weight is quantised."
)


def without_derivative(
    op: str,
    run: Callable[[Any], Any],
    operands: tuple,
    arrays: tuple | None = None,
    *,
    instead: str | None = None,
) -> Any:
    """`run(operands)`, which refuses to be differentiated by them.

    `arrays` of an epilogue follow the operands, and have derivatives.

    Raises:
      NotImplementedError: it is differentiated by values or scales; with what to do `instead`, by
        default the same of `stretto.fp8`.
    """
    instead = instead or f"differentiate stretto.fp8.{op}, which quantises its operands itself"

    def whole(operands: tuple, arrays: tuple | None) -> Any:
        return run(operands if arrays is None else (*operands, arrays))

    product = jax.custom_jvp(whole)

    def of_arrays(primals: Any, tangents: Any) -> tuple[Any, Any]:
        if not all(isinstance(dot, SymbolicZero) for dot in jax.tree.leaves(tangents[0])):
            raise NotImplementedError(
                f"{op}: a product of operands in 8 bits with scales has no derivative; {instead}."
            )
        operands, arrays = primals
        dots = jax.tree.map(_as_array, tangents[1])
        return jax.jvp(lambda arrays: whole(operands, arrays), (arrays,), (dots,))

    product.defjvp(of_arrays, symbolic_zeros=True)
    return product(operands, arrays)


def _as_array(dot: Any) -> jax.Array:
    missing: Any = dot
    return jnp.zeros(dot.shape, missing.dtype) if isinstance(dot, SymbolicZero) else dot


def each(op: str, given: Any, operands: tuple) -> tuple:
    """A scale for each operand: of a tuple as many, of a single one its own, of None none."""
    if given is None:
        return (None,) * len(operands)
    if not isinstance(given, tuple | list):
        given = (given,)
    if len(given) != len(operands):
        raise ValueError(
            f"{op}: there are {len(given)} scales for {len(operands)} operands; pass a tuple with"
            " one for each."
        )
    return tuple(given)


def obstacle(transposed: bool, pairs: int = 1) -> str | None:
    """Why no kernel can serve such operands; None where one can."""
    if not transposed:
        return NOT_K_MAJOR
    if pairs > 1:
        return f"{pairs} pairs have scales of their own each, and a kernel takes one pair."
    return None


def alike(operands: Any, axes: Axes) -> Any:
    """`typed_alike` of a tree of operands."""
    leaves, tree = jax.tree.flatten(operands)
    return jax.tree.unflatten(tree, typed_alike(axes, leaves))
