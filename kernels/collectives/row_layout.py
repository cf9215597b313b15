"""Arrays as the collectives move them: parts of whole rows of 512 bytes.

A collective is a matter of contiguous parts, one for each device: whatever the shape, the operand
is seen as `[parts, rows, columns]`, where a row is 512 bytes (256 of a type of one byte). A part
that does not fill its rows is padded, which copies the operand; so does an axis that is not the
first, or not alone.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from stretto.distributed.schedule import ceil_div

ROW_BYTES = 512
MAX_COLUMNS = 256  # of the copy engine
# More rows than this are padded to a multiple of `ROWS`, so that they divide into equal pieces.
FEW_ROWS = 64
ROWS = 16


def columns_of(dtype: jax.typing.DTypeLike) -> int:
    """Elements in a row."""
    return min(ROW_BYTES // jnp.dtype(dtype).itemsize, MAX_COLUMNS)


def to_rows(x: jax.Array, parts: int) -> jax.Array:
    """`x`, of `parts` equal parts one after another, as `[parts, rows, columns]`."""
    columns = columns_of(x.dtype)
    size = x.size // parts
    rows = ceil_div(size, columns)
    if rows > FEW_ROWS:
        rows = ceil_div(rows, ROWS) * ROWS
    flat = x.reshape(parts, size)
    if rows * columns != size:
        flat = jnp.pad(flat, ((0, 0), (0, rows * columns - size)))
    return flat.reshape(parts, rows, columns)


def from_rows(rows: jax.Array, part_shape: tuple[int, ...]) -> jax.Array:
    """The inverse: `[parts, rows, columns]` as `[parts, *part_shape]`."""
    flat = rows.reshape(rows.shape[0], -1)
    return flat[:, : math.prod(part_shape)].reshape(rows.shape[0], *part_shape)


def as_words(x: jax.Array) -> jax.Array:
    """`x`, bit for bit, in a type that every copy takes: unsigned integers of the same width.

    bool goes as bytes. 64 bit types split into a last dimension of two 32 bit words.
    """
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint8)
    bits = 8 * x.dtype.itemsize
    if bits == 64:
        return lax.bitcast_convert_type(x, jnp.uint32)
    return lax.bitcast_convert_type(x, jnp.dtype(f"uint{bits}"))


def from_words(words: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """The inverse of `as_words`."""
    dtype = jnp.dtype(dtype)
    if dtype == jnp.bool_:
        return words.astype(jnp.bool_)
    return lax.bitcast_convert_type(words, dtype)


def piece_rows(rows: int, most: int) -> int:
    """Rows of a piece: as many as allowed that divide `rows`.

    Pieces must not reach over the end of a part: Mosaic GPU copies a contiguous window in one go,
    on into the next part (seen on H100s with JAX 0.11.2).
    """
    return max(size for size in range(1, min(most, rows) + 1) if rows % size == 0)
