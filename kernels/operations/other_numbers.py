"""Collectives of what is moved as other numbers: random keys, and numbers narrower than a byte."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from stretto.distributed.primitives.linear import linear
from stretto.kernels.collectives import row_layout
from stretto.kernels.operation import Axes
from stretto.kernels.operations.perform import typed_alike

type Move = Callable[[jax.Array], jax.Array]


def are_needed(x: Any) -> bool:
    """Whether `x` is moved as other numbers.

    Not only by the kernels: XLA's collectives on CPUs give wrong int2 (JAX 0.11.2).
    """
    return _are_keys(x) or row_layout.bits_of(x.dtype) < 8


def move(x: jax.Array, axes: Axes, move: Move, transpose: Move, parts: int = 1) -> jax.Array:
    """`move` of numbers that hold those of `x`; its derivative is `transpose`.

    `parts` of the last dimension may be taken apart by `move` (`row_layout.of_bytes`).
    """
    if _are_keys(x):
        return row_layout.of_key_data(move, x)
    call = functools.partial(row_layout.of_bytes, move, parts=parts)
    (alike,) = typed_alike(axes, [x])
    return linear(lambda _, x: call(x), lambda _, bar: transpose(bar), (), alike)


def _are_keys(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
