"""How sums of tokens' rows are cut up: pieces of rows, and what memory they go through."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.kernels.collectives.dispatch import SMEM_BYTES
from stretto.kernels.collectives.token_tables import REGISTER_BYTES, TABLE_SLOTS, Chunks, Row

THREADS = 128  # Of a warpgroup.
DIRECT_BYTES = 2048
"""That a warpgroup loads at once of global memory: 16 bytes a thread."""
DIRECT_REGISTER_BYTES = {1: 256, 2: 256, 3: 256, 4: 128}
"""Of a thread, for rows, by the warpgroups of a block: with more, those of four spill."""
MOST_ELEMENTS = 4096  # Of a sum, 32 registers of each thread.


@dataclasses.dataclass(frozen=True)
class Piece:
    """A piece of a row that is summed at once: `parts` of the row's, `padded` in shared memory."""

    parts: int
    padded: int

    @classmethod
    def of(cls, parts: int, columns: int, itemsize: int) -> Piece:
        """The fewest added, so that a warpgroup loads all of it at once."""
        padded = parts
        while padded * columns * itemsize % REGISTER_BYTES:
            padded += 1
        return cls(parts, padded)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summing:
    """How the sums are made, as far as it is known before there is any memory.

    Attributes:
      row: of the rows, in global memory.
      piece: of a row, summed at once.
      top_k: choices of a token.
      stages: sums whose rows are on their way at once.
      chunks: which tokens, and how often they are walked through: once with all pieces of each, or
        in a round for each piece.
      dtype: of the rows.
      wire_dtype: of the sums.
      direct: rows go to registers, not through shared memory.
      ring: slots of a warpgroup for rows that a warp of their own loads (`fed_sums`); 0 where the
        warpgroup loads them.
    """

    row: Row
    piece: Piece
    top_k: int
    stages: int
    chunks: Chunks
    dtype: Any
    wire_dtype: Any
    direct: bool = False
    ring: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        """Of a piece in shared memory."""
        return self.piece.padded, self.row.columns

    @property
    def pieces(self) -> int:
        """Of a token that follow each other: in rounds one."""
        return self.row.parts // self.piece.parts // self.chunks.rounds

    @property
    def layout(self) -> Any:
        """Of a piece in registers: eight bytes a thread at once, or 16 of global memory."""
        at_once = DIRECT_BYTES if self.direct else REGISTER_BYTES
        return plgpu.Layout.WG_STRIDED(
            self.shape, at_once // THREADS // jnp.dtype(self.dtype).itemsize
        )

    def scratch(self) -> dict[str, Any]:
        """Shared memory and barriers, by name, for `kernel.launch`."""
        width = self.chunks.padded_width(self.top_k)
        each = self.chunks.warpgroups
        stages = each * self.stages
        buffers = self._ring(each) if self.ring else {} if self.direct else self._buffers(stages)
        return dict(
            **buffers,
            token_table=self.chunks.scratch(width, jnp.int32),
            factors=self.chunks.scratch(width, jnp.float32),
            token_table_arrived=plgpu.Barrier(num_arrivals=2, num_barriers=each * TABLE_SLOTS),
            sums=plgpu.SMEM((each * 2, *self.shape), self.wire_dtype),
        )

    def _ring(self, warpgroups: int) -> dict[str, Any]:
        slots, tables = warpgroups * self.ring, warpgroups * TABLE_SLOTS
        return dict(
            ring=plgpu.SMEM((slots, *self.shape), self.dtype),
            row_loaded=plgpu.Barrier(num_barriers=slots),
            row_freed=plgpu.Barrier(num_barriers=slots),
            tables_freed=plgpu.Barrier(num_barriers=tables),
        )

    def _buffers(self, stages: int) -> dict[str, Any]:
        return dict(
            buffers=plgpu.SMEM((stages, self.top_k, *self.shape), self.dtype),
            **{f"loaded{j}": plgpu.Barrier(num_barriers=stages) for j in range(self.top_k)},
        )


def sum_bytes(top_k: int, itemsize: int) -> int:
    """Of an element of two sums: their rows, and what they are stored from."""
    return 2 * top_k * itemsize + 2 * 4


def piece_of(row: Row, itemsize: int, top_k: int, room: int = SMEM_BYTES, peers: int = 0) -> Piece:
    """The largest that fits registers, and twice into `room` bytes for all choices, and for `peers`
    sums of up to 4 bytes each."""
    for parts in range(row.parts, 0, -1):
        piece = Piece.of(parts, row.columns, itemsize)
        elements = piece.padded * row.columns
        fits = (sum_bytes(top_k, itemsize) + 8 * peers) * elements <= room
        if row.parts % parts == 0 and fits and elements <= MOST_ELEMENTS:
            return piece
    raise ValueError(f"top_k={top_k} rows of {row} do not fit into the shared memory.")


def direct_piece(row: Row, itemsize: int, top_k: int, warpgroups: int) -> Piece | None:
    """The largest of which a thread holds all choices in registers; None if none is even."""
    most = DIRECT_REGISTER_BYTES[warpgroups] * THREADS // (top_k * itemsize)
    for parts in range(row.parts, 0, -1):
        elements = parts * row.columns
        whole = elements * itemsize % DIRECT_BYTES == 0
        if row.parts % parts == 0 and whole and elements <= min(most, MOST_ELEMENTS):
            return Piece(parts, parts)
    return None
