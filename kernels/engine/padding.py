"""Which matrices the copy engine takes as they are, and what is padded of the others.

| a matrix | is taken |
|---|---|
| of whole 8 x 64 tiles of swizzled rows, two at least a side | as it is, a tile of a product by one copy |
| whose rows are multiples of 16 bytes | as it is, through rows of 128 bytes (`shared_memory.with_edges`) |
| of any other | with its columns filled up to such rows, or to multiples of 128 bytes: a copy |

Rows that are no multiples of 128 bytes cost more to load: each row of a tile then lies in two lines of
the L2. Of rhs a pair of blocks, which load its tiles for each other, asks for half of them
(`Tiles.sharing`). A matrix that is used often could be copied to such rows all the same; by default
none is (`REUSE`).

Along a dimension of one 8 x 64 tile Mosaic GPU ignores the index, so a store past the edge, which
should be dropped, would land in the first tile (seen on H100s with JAX 0.11.2). A main loop that takes
whole tiles only (`TileShape.takes_edges`) has everything padded to them.
"""  # noqa: E501

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
from jax import lax

from stretto.kernels.engine.shared_memory import row_elements
from stretto.kernels.engine.tiles import TileShape

# Multiples that the rows and the columns of a 16 bit operand of whole tiles have.
ROWS = 8
COLUMNS = 64
ROW_BYTES = 16
"""Of which the rows of every array that the copy engine takes are a multiple."""
WORD_BYTES = 4
"""Of an element that XLA copies."""
USES_OF_A_COPY = dict(lhs=6144, rhs=3072)
"""Columns of the result at which lhs, by rows that are not aligned, loses what a copy of it would take,
and rows of the result for rhs: how `copied` counts what a kernel loses and XLA's matmul does not. On
one H200 a product of 8192 x 8192 x 8192 took 1,615 us, of 8184 x 8200 x 8168 1,957 with rhs transposed
and 2,136 with it as it was. On two, a fused all-gather of such sizes lost 277 us more than XLA, a
reduce-scatter 133; a copy of both operands takes some 145."""  # noqa: E501
MOST_FILLED = 1 / 16
"""Of an operand that must be copied, the share of zeros up to which its rows become multiples of
128 bytes in place of 16."""
REUSE: dict[str, float] = dict(lhs=math.inf, rhs=math.inf)
"""Uses, counted likewise, from which on an operand is copied to rows of 128 bytes. None is: on two
H200s an all-gather matmul of 1000 x 3072 x 8208 took 58 us, and 74 with a copy of rhs."""


def columns_of(dtype: jax.typing.DTypeLike) -> int:
    """The multiple that the columns of whole tiles of a type are: a row of the swizzle."""
    return row_elements(dtype)


def is_whole(shape: Sequence[int], dtype: jax.typing.DTypeLike) -> bool:
    """Whether a matrix `[..., rows, columns]` is made of whole tiles, two at least a side."""
    multiples = ROWS, columns_of(dtype)
    return all(n == padded(n, by) for n, by in zip(shape[-2:], multiples, strict=True))


def padded(size: int, multiple: int) -> int:
    """The least number of elements in whole tiles, of `multiple` each, that is not below `size`."""
    return max(-(-size // multiple), 2) * multiple


def in_lines(columns: int, dtype: jax.typing.DTypeLike) -> int:
    """The least number of columns, not below `columns`, whose rows are multiples of 128 bytes."""
    row = row_elements(dtype)
    return -(-columns // row) * row


def shape_of(
    shape: Sequence[int],
    dtype: jax.typing.DTypeLike,
    tiles: TileShape,
    rows: int = ROWS,
    *,
    copied: bool = False,
) -> tuple[int, int]:
    """Rows and columns of a matrix `[..., m, n]` once it is padded for a product in `tiles`.

    `rows` is the multiple that its rows must be where the main loop takes whole tiles only. With
    `copied` it is used often enough for rows of 128 bytes.
    """
    m, n = shape[-2:]
    if not tiles.takes_edges:
        return padded(m, rows), padded(n, columns_of(dtype))
    if is_whole(shape, dtype):
        return m, n
    if copied:
        return m, in_lines(n, dtype)
    in_a_row = ROW_BYTES // jnp.dtype(dtype).itemsize
    least, aligned = -(-n // in_a_row) * in_a_row, in_lines(n, dtype)
    return m, aligned if least > n and aligned - n <= MOST_FILLED * n else least


def pad(x: jax.Array, tiles: TileShape, rows: int = ROWS, *, copied: bool = False) -> jax.Array:
    """`x` `[..., m, n]` with zeros below and to the right, as `shape_of` says.

    An array of the right sizes comes back as it is; any other is copied.
    """
    return _filled_up(x, *shape_of(x.shape, x.dtype, tiles, rows, copied=copied))


def made_columns(
    columns: int, padded_columns: int, dtype: jax.typing.DTypeLike, tiles: TileShape
) -> int:
    """Columns of a result of which `columns` are wanted and rhs, padded, has `padded_columns`."""
    if not tiles.takes_edges:
        return padded_columns
    in_a_row = ROW_BYTES // jnp.dtype(dtype).itemsize
    return -(-columns // in_a_row) * in_a_row


def pad_to_tiles(x: jax.Array, rows: int) -> jax.Array:
    """`x` `[..., m, n]` with zeros up to whole tiles, and up to a multiple of `rows`."""
    return _filled_up(x, padded(x.shape[-2], rows), padded(x.shape[-1], columns_of(x.dtype)))


class Edges(TypedDict):
    """What a `Product` is told of its matrices."""

    lhs_edges: bool
    rhs_edges: bool
    out_edges: bool


def edges(tiles: TileShape, *, lhs: Any, rhs: Any, out: Any) -> Edges:
    """Which of the matrices, padded or made for `tiles`, have edges.

    Each is an array or its shape and type, or several of these.
    """

    def has_edges(matrix: Any) -> bool:
        whole = all(is_whole(x.shape, x.dtype) for x in jax.tree.leaves(matrix))
        return tiles.takes_edges and not whole

    return Edges(lhs_edges=has_edges(lhs), rhs_edges=has_edges(rhs), out_edges=has_edges(out))


def pad_parts(x: jax.Array, axis: int, parts: int, size: int) -> jax.Array:
    """A matrix with zeros after each of `parts` equal parts of `axis`, up to `size` of each."""
    given = x.shape[axis] // parts
    missing = size - given
    if not missing:
        return x
    separated = x.reshape(*x.shape[:axis], parts, given, *x.shape[axis + 1 :])
    widths = [(0, missing if dim == axis + 1 else 0) for dim in range(separated.ndim)]
    shape = (*x.shape[:axis], parts * size, *x.shape[axis + 1 :])
    return jnp.pad(separated, widths).reshape(shape)


def pad_rows(x: jax.Array, rows: int) -> jax.Array:
    """A matrix with zeros below, up to so many rows."""
    return _filled_up(x, rows, x.shape[-1])


def cut(x: jax.Array, rows: int, columns: int) -> jax.Array:
    """The first `rows` and `columns` of `x` `[..., m, n]`: as it is, or a copy."""
    if x.shape[-1] == columns:
        return x[..., :rows, :]
    return _by_words(x, columns, lambda x, columns: x[..., :rows, :columns])


def _filled_up(x: jax.Array, rows: int, columns: int) -> jax.Array:
    below = rows - x.shape[-2]
    if not below and columns == x.shape[-1]:
        return x

    def fill(x: jax.Array, columns: int) -> jax.Array:
        right = columns - x.shape[-1]
        return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, below), (0, right)])

    return _by_words(x, columns, fill)


def _by_words(x: jax.Array, columns: int, copy: Callable[[jax.Array, int], jax.Array]) -> jax.Array:
    """`copy(x, columns)`, of words in place of shorter elements where rows are whole words.

    XLA copies one element after another where rows begin at any of them: on an H200 3072 x 4100 of
    16 bits in 21 us, and in 17 as words.
    """
    together = WORD_BYTES // x.dtype.itemsize
    if together < 2 or x.shape[-1] % together or columns % together:
        return copy(x, columns)
    words = lax.bitcast_convert_type(
        x.reshape(*x.shape[:-1], x.shape[-1] // together, together), jnp.uint32
    )
    copied = lax.bitcast_convert_type(copy(words, columns // together), x.dtype)
    return copied.reshape(*copied.shape[:-2], columns)


def in_shards(x: jax.Array, shards: int) -> jax.Array:
    """`[m, n]` -> `[shards, m_shard, n]`; zeros fill up the last ones where m does not divide."""
    m_shard = -(-x.shape[0] // shards)
    return pad_rows(x, shards * m_shard).reshape(shards, m_shard, x.shape[1])
