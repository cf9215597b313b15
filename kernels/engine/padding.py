"""Padding matrices to the sizes that the copy engine takes: whole 8 x 64 tiles of swizzled rows.

At least two such tiles a side, too: along a dimension of one tile Mosaic GPU ignores the index, so
a store past the edge, which should be dropped, would land in the first tile (seen on H100s with
JAX 0.11.2).
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from stretto.kernels.engine.shared_memory import row_elements

# Multiples that the rows and the columns of a 16 bit operand must have.
ROWS = 8
COLUMNS = 64


def columns_of(dtype: jax.typing.DTypeLike) -> int:
    """The multiple that the columns of an operand of a type must have: a row of the swizzle."""
    return row_elements(dtype)


def padded(size: int, multiple: int) -> int:
    """The least allowed size that is not below `size`."""
    return max(-(-size // multiple), 2) * multiple


def pad(x: jax.Array, rows: int, columns: int) -> jax.Array:
    """`x` `[..., m, n]` with zeros below and to the right, up to `padded` numbers of both.

    An array of the right sizes comes back as it is; any other is copied.
    """
    m, n = x.shape[-2:]
    below, right = padded(m, rows) - m, padded(n, columns) - n
    if not below and not right:
        return x
    return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, below), (0, right)])


def in_shards(x: jax.Array, shards: int) -> jax.Array:
    """`[m, n]` -> `[shards, m_shard, n]`; zeros fill up the last ones where m does not divide."""
    m_shard = -(-x.shape[0] // shards)
    if missing := shards * m_shard - x.shape[0]:
        x = jnp.pad(x, ((0, missing), (0, 0)))
    return x.reshape(shards, m_shard, x.shape[1])


def pad_shards(matrices: Sequence[jax.Array], shards: int, columns: int) -> list[jax.Array]:
    """Each of the matrices in shards of its rows, padded."""
    return [pad(in_shards(x, shards), ROWS, columns) for x in matrices]


def pad_parts(x: jax.Array, axis: int, parts: int, multiple: int) -> jax.Array:
    """A matrix with zeros after each of `parts` equal parts of `axis`, each `padded` in size."""
    size = x.shape[axis] // parts
    missing = padded(size, multiple) - size
    if not missing:
        return x
    separated = x.reshape(*x.shape[:axis], parts, size, *x.shape[axis + 1 :])
    widths = [(0, missing if dim == axis + 1 else 0) for dim in range(separated.ndim)]
    shape = (*x.shape[:axis], parts * (size + missing), *x.shape[axis + 1 :])
    return jnp.pad(separated, widths).reshape(shape)
