"""Padding matrices to the sizes that the copy engine takes: whole 8 x 64 tiles of swizzled rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp

# Multiples that the rows and the columns of a 16 bit operand must have.
ROWS = 8
COLUMNS = 64


def pad(x: jax.Array, rows: int, columns: int) -> jax.Array:
    """`x` `[m, n]` with zeros below and to the right, up to multiples of `rows` and `columns`.

    A matrix of the right sizes comes back as it is; any other is copied.
    """
    below, right = -x.shape[0] % rows, -x.shape[1] % columns
    return jnp.pad(x, ((0, below), (0, right))) if below or right else x
