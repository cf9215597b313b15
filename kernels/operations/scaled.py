"""What the matmuls of operands in 8 bits with scales have in common.

The public functions go to `scaled_gather`, `scaled_sums` and `scaled_groups` where a scale is given. The
products are not differentiable, since rounding to 8 bits has no derivative of use: `stretto.fp8`
differentiates what it quantises itself.
"""  # noqa: E501

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax

from stretto.kernels.operation import Axes, Operation
from stretto.kernels.operations import epilogues
from stretto.kernels.operations.perform import typed_alike
from stretto.kernels.problem import scales

type Records = Mapping[scales.Granularity, Operation]
"""Of one operation, by the granularity of the scales."""

NOT_K_MAJOR = (
    "rhs in 8 bits is multiplied along its rows (K-major): pass it as [n, k] with"
    " rhs_transposed=True, a copy that is made once, where the weight is quantised."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """What a call asks for besides operands and scales, as the public functions take it."""

    epilogue: epilogues.Like
    out_dtype: Any
    rhs_transposed: bool
    config: Any
    backend: str


def without_derivative(
    op: str, run: Callable[[Any], Any], operands: Any, instead: str | None = None
) -> Any:
    """`run(operands)`, which refuses to be differentiated.

    Raises:
      NotImplementedError: it is; with what to do `instead`, by default the same of `stretto.fp8`.
    """
    instead = instead or f"differentiate stretto.fp8.{op}, which quantises its operands itself"

    @jax.custom_jvp
    def product(operands: Any) -> Any:
        return run(operands)

    @product.defjvp
    def _refuse(primals: Any, tangents: Any) -> Any:
        del primals, tangents
        raise NotImplementedError(
            f"{op}: a product of operands in 8 bits with scales has no derivative; {instead}."
        )

    return product(operands)


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
