"""The order of shards and pieces, as integer functions that are tested without a GPU.

Every function takes Python ints, or int32 values inside a kernel.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

type Int = int | jax.Array


def ceil_div(a: int, b: int) -> int:
    """`a / b` rounded up, for `a >= 0` and `b > 0`."""
    return -(-a // b)


def div(a: Int, b: Int) -> Int:
    """`a // b` for `a >= 0`: inside a kernel without the sign correction that `//` would add."""
    if isinstance(a, int):
        return a // b
    return lax.div(a, a.dtype.type(b) if isinstance(b, int) else b)


def rem(a: Int, b: int) -> Int:
    """`a % b` for `a >= 0`."""
    return a % b if isinstance(a, int) else lax.rem(a, a.dtype.type(b))


def where(condition: bool | jax.Array, a: Int, b: Int) -> Int:
    """`a` where `condition` holds, else `b`."""
    if isinstance(condition, bool):
        return a if condition else b
    return lax.select(condition, jnp.int32(a), jnp.int32(b))


def share(total: Int, part: Int, parts: int) -> Int:
    """How many of `total` items worker `part` of `parts` gets when item `i` goes to `i % parts`."""
    return div(total + parts - 1 - part, parts)


def shard_of_step(device_id: Int, step: Int, size: int) -> Int:
    """The shard that `device_id` works on at `step`: its own first, then its successors' in turn.

    At every step all devices work on different shards, so no device sends a shard to two
    peers at once.
    """
    return rem(device_id + step, size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PullPlan:
    """How a team's blocks fetch the shards of their peers, piece by piece.

    A shard of `rows` x `columns` is cut into pieces of `piece_rows` x `piece_columns`; pieces at
    the edges may be smaller. `chunk_columns` columns of a whole shard are a chunk, which one
    semaphore counts. Pieces are in the order in which they are wanted: all pieces of the first
    chunk of the first shard, then of its second chunk, and so on through the shards.
    """

    rows: int
    columns: int
    piece_rows: int
    piece_columns: int
    chunk_columns: int

    def __post_init__(self) -> None:
        if self.chunk_columns % self.piece_columns:
            raise ValueError(
                f"chunk_columns={self.chunk_columns} must be a multiple of"
                f" piece_columns={self.piece_columns}."
            )

    @property
    def pieces_across(self) -> int:
        """Pieces along the columns of a shard."""
        return ceil_div(self.columns, self.piece_columns)

    @property
    def pieces_down(self) -> int:
        """Pieces along the rows of a shard."""
        return ceil_div(self.rows, self.piece_rows)

    @property
    def pieces(self) -> int:
        """Pieces of one shard."""
        return self.pieces_across * self.pieces_down

    @property
    def chunks(self) -> int:
        """Chunks of one shard."""
        return ceil_div(self.columns, self.chunk_columns)

    def piece_of(self, index: Int) -> tuple[Int, Int]:
        """(shard, piece within it) of the piece at `index`, shard after shard."""
        shard = div(index, self.pieces)
        return shard, index - shard * self.pieces

    def locate(self, piece: Int) -> tuple[Int, Int, Int]:
        """(first row, first column, chunk) of a piece of a shard."""
        across = div(piece, self.pieces_down)
        down = piece - across * self.pieces_down
        chunk = div(across, self.chunk_columns // self.piece_columns)
        return down * self.piece_rows, across * self.piece_columns, chunk

    def pieces_in_chunk(self, chunk: Int) -> Int:
        """The count of `chunk`'s semaphore once all of the chunk has arrived."""
        full = self.chunk_columns // self.piece_columns
        last = self.pieces_across - full * (self.chunks - 1)
        return where(chunk == self.chunks - 1, last, full) * self.pieces_down


@dataclasses.dataclass(frozen=True, kw_only=True)
class BandedPullPlan:
    """How a team's blocks fetch what their peers hold of a matrix's columns, band by band of rows.

    Each of `sources` peers has a shard of `rows` x `columns`, other columns of the same rows.
    They are wanted in bands of `band_rows`: of the first band all shards, one after the other,
    then of the second. Within a band's shard, pieces of `piece_rows` x `piece_columns` follow each
    other along the columns, row of pieces after row of pieces; pieces at the edges may be smaller.
    `chunk_rows` rows of a shard are a chunk, which one semaphore counts.
    """

    sources: int
    rows: int
    columns: int
    piece_rows: int
    piece_columns: int
    chunk_rows: int
    band_rows: int

    def __post_init__(self) -> None:
        for name, size, by in (
            ("chunk_rows", self.chunk_rows, "piece_rows"),
            ("band_rows", self.band_rows, "chunk_rows"),
        ):
            if size % getattr(self, by):
                raise ValueError(f"{name}={size} must be a multiple of {by}={getattr(self, by)}.")

    @property
    def pieces_across(self) -> int:
        """Pieces along the columns of a shard."""
        return ceil_div(self.columns, self.piece_columns)

    @property
    def pieces(self) -> int:
        """Pieces of all shards."""
        return self.sources * ceil_div(self.rows, self.piece_rows) * self.pieces_across

    @property
    def chunks(self) -> int:
        """Chunks of one shard."""
        return ceil_div(self.rows, self.chunk_rows)

    def locate(self, index: Int) -> tuple[Int, Int, Int, Int]:
        """(shard, first row, first column, chunk) of the piece at `index`, in the order of use."""
        down = self.band_rows // self.piece_rows
        full_bands, rest = divmod(self.rows, self.band_rows)
        last_down = ceil_div(rest, self.piece_rows)
        band = div(index, self.sources * down * self.pieces_across)
        within = index - band * (self.sources * down * self.pieces_across)
        source = div(within, down * self.pieces_across)
        piece = within - source * (down * self.pieces_across)
        if rest:
            is_last = band == full_bands
            last_source = div(within, last_down * self.pieces_across)
            source = where(is_last, last_source, source)
            last_piece = within - last_source * (last_down * self.pieces_across)
            piece = where(is_last, last_piece, piece)
        piece_row = div(piece, self.pieces_across)
        column = (piece - piece_row * self.pieces_across) * self.piece_columns
        row = band * self.band_rows + piece_row * self.piece_rows
        return source, row, column, div(row, self.chunk_rows)

    def pieces_in_chunk(self, chunk: Int) -> Int:
        """The count of `chunk`'s semaphore once all of the chunk has arrived."""
        full = self.chunk_rows // self.piece_rows
        last = ceil_div(self.rows - self.chunk_rows * (self.chunks - 1), self.piece_rows)
        return where(chunk == self.chunks - 1, last, full) * self.pieces_across
