"""Values in 8 bits that a backward pass needs, as bits.

A policy of `jax.checkpoint` may save them. Of floats that it saves JAX 0.11.2 reduces the precision
to theirs, as of an IEEE type: a float8_e4m3fn above 240, of which the largest is 448, would be NaN.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


@functools.partial(jax.tree_util.register_dataclass, data_fields=["bits"], meta_fields=["dtype"])
@dataclasses.dataclass(frozen=True, kw_only=True)
class Bits:
    """An array of `dtype`, as uint8."""

    bits: jax.Array
    dtype: str


def to_bits(tree: Any) -> Any:
    """`tree`, its floats of 8 bits as `Bits`."""

    def of(x: Any) -> Any:
        if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize > 1:
            return x
        return Bits(bits=lax.bitcast_convert_type(x, jnp.uint8), dtype=str(x.dtype))

    return jax.tree.map(of, tree)


def from_bits(tree: Any) -> Any:
    """What `to_bits` was given."""

    def of(x: Any) -> Any:
        return lax.bitcast_convert_type(x.bits, x.dtype) if isinstance(x, Bits) else x

    return jax.tree.map(of, tree, is_leaf=lambda x: isinstance(x, Bits))
