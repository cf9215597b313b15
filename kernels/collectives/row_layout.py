"""Arrays as the collectives move them: parts of whole rows of 512 bytes.

A collective moves contiguous parts, one for each device. An operand of any shape
is viewed as `[parts, rows, columns]`, where a row is 512 bytes (256 of a type of one byte). A part
that does not fill its rows is padded, which copies the operand; so does an axis that is not the
first, or not alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable

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


def is_in_rows(size: int, dtype: jax.typing.DTypeLike) -> bool:
    """Whether `to_rows` takes parts of so many elements as they are, without a copy."""
    rows, rest = divmod(size, columns_of(dtype))
    return not rest and (rows <= FEW_ROWS or rows % ROWS == 0)


def from_rows(rows: jax.Array, part_shape: tuple[int, ...]) -> jax.Array:
    """The inverse: `[parts, rows, columns]` as `[parts, *part_shape]`."""
    flat = rows.reshape(rows.shape[0], -1)
    return flat[:, : math.prod(part_shape)].reshape(rows.shape[0], *part_shape)


def bits_of(dtype: jax.typing.DTypeLike) -> int:
    """Bits of an element: fewer than 8 of the narrowest numbers, which `itemsize` rounds up."""
    dtype = jnp.dtype(dtype)
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).bits
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.finfo(dtype).bits
    return 8 * dtype.itemsize


def as_words(x: jax.Array) -> jax.Array:
    """`x`, bit for bit, in a type that every copy takes: unsigned integers of the same width.

    bool goes as bytes. 64 bit types split into a last dimension of two 32 bit words; complex ones
    into a last dimension of the two parts, and those like other numbers.
    """
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint8)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jnp.stack([as_words(lax.real(x)), as_words(lax.imag(x))], x.ndim)
    bits = 8 * x.dtype.itemsize
    if bits == 64:
        return lax.bitcast_convert_type(x, jnp.uint32)
    return lax.bitcast_convert_type(x, jnp.dtype(f"uint{bits}"))


def from_words(words: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """The inverse of `as_words`."""
    dtype = jnp.dtype(dtype)
    if dtype == jnp.bool_:
        return words.astype(jnp.bool_)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        part, at = jnp.finfo(dtype).dtype, words.ndim - (1 if dtype.itemsize == 8 else 2)
        real, imag = (lax.index_in_dim(words, i, at, keepdims=False) for i in range(2))
        return lax.complex(from_words(real, part), from_words(imag, part))
    return lax.bitcast_convert_type(words, dtype)


def of_key_data(move: Callable[[jax.Array], jax.Array], keys: jax.Array) -> jax.Array:
    """Random keys: `move` of the numbers that `keys` consist of, along a last dimension."""
    numbers = move(jax.random.key_data(keys))
    return jax.random.wrap_key_data(numbers, impl=jax.random.key_impl(keys))


def of_bytes(move: Callable[[jax.Array], jax.Array], x: jax.Array, parts: int) -> jax.Array:
    """Numbers narrower than a byte: `move` of bytes that hold those of `x`, moved on from there.

    They hold several neighbours in the last dimension where its `parts`, which `move` may take
    apart, have whole bytes of them; else one each.
    """
    bits = bits_of(x.dtype)
    narrow, in_a_byte = jnp.dtype(f"uint{bits}"), 8 // bits
    numbers = lax.bitcast_convert_type(x, narrow)
    *rest, last = x.shape or (1,)
    if last % (parts * in_a_byte):
        moved = move(numbers.astype(jnp.uint8)).astype(narrow)
    else:
        groups = numbers.reshape(*rest, last // in_a_byte, in_a_byte)
        moved = lax.bitcast_convert_type(move(lax.bitcast_convert_type(groups, jnp.uint8)), narrow)
        moved = moved.reshape(*moved.shape[:-2], moved.shape[-2] * in_a_byte)
    return lax.bitcast_convert_type(moved, x.dtype)


def piece_rows(rows: int, most: int) -> int:
    """Rows of a piece: as many as allowed that divide `rows`.

    Pieces must not reach over the end of a part: Mosaic GPU copies a contiguous window in one go,
    on into the next part (seen on H100s with JAX 0.11.2).
    """
    return max(size for size in range(1, min(most, rows) + 1) if rows % size == 0)
