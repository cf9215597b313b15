"""How sums of tokens' rows are cut up: pieces of rows, and what memory they go through."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.kernels.collectives.dispatch import MOST_SLOTS, MOST_SMEM_BYTES, SMEM_BYTES
from stretto.kernels.collectives.token_tables import (
    REGISTER_BYTES,
    TABLE_SLOTS,
    Chunks,
    Row,
)

THREADS = 128  # Of a warpgroup.
MOST_ELEMENTS = 4096  # Of a sum, 32 registers of each thread.
FEWEST_ROWS = 4  # Of a ring, for which a piece of a row is small enough.
PEERS_SUMS = 4  # Of a warpgroup on their way at once, where they fit.


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
        """Of a piece in registers: eight bytes a thread at once."""
        at_once = REGISTER_BYTES // THREADS // jnp.dtype(self.dtype).itemsize
        return plgpu.Layout.WG_STRIDED(self.shape, at_once)

    def split(self, senders: int = 0) -> tuple[Summing, Summing]:
        """The sums of the peers' tokens, by the first blocks, and those of the own tokens.

        `senders` blocks make the former, by default a share of them for each peer.
        """
        team, blocks = self.chunks.team, self.chunks.num_blocks
        senders = min(senders or blocks * (team.size - 1) // team.size, blocks - 1)
        theirs = self._of_some(range(1, team.size), range(senders))
        return theirs, self._of_some(range(1), range(senders, blocks))

    def _of_some(self, whose: range, blocks: range) -> Summing:
        chunks = dataclasses.replace(
            self.chunks, whose=whose, num_blocks=len(blocks), first_block=blocks.start
        )
        return dataclasses.replace(self, chunks=chunks)

    def scratch(self) -> dict[str, Any]:
        """Shared memory and barriers, by name, for `kernel.launch`."""
        each = self.chunks.warpgroups
        stages = each * self.stages
        buffers = self._ring(each) if self.ring else self._buffers(stages)
        return dict(
            **buffers,
            token_table=self.chunks.scratch(self.top_k, jnp.int32),
            factors=self.chunks.scratch(self.top_k, jnp.float32),
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


def shared(memory: Mapping[str, Mapping[str, Any]]) -> tuple[Any, dict[str, Any]]:
    """What roles declare, each in blocks of its own: (arrays in the same memory, the barriers)."""
    arrays, barriers = [], {}
    for role, declared in memory.items():
        arrays.append([x for x in declared.values() if not isinstance(x, plgpu.Barrier)])
        found = {role + n: x for n, x in declared.items() if isinstance(x, plgpu.Barrier)}
        barriers.update(found)
    return plgpu.RefUnion(*arrays), barriers


def of_each(
    memory: Mapping[str, Mapping[str, Any]], arrays: Any, barriers: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """The refs of each role by the names that it declared, of what `shared` made."""
    found = {}
    for (role, declared), refs in zip(memory.items(), map(iter, arrays), strict=True):
        found[role] = {
            n: barriers[role + n] if role + n in barriers else next(refs) for n in declared
        }
    return found


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


def ring_of(
    *,
    row: Row,
    top_k: int,
    chunks: Chunks,
    dtype: Any,
    wire_dtype: Any,
    slots: int,
    totals: bool,
) -> Summing:
    """Sums of rows that come through a ring of up to `slots` in each warpgroup's shared memory.

    With `totals` there are also rings of what peers stored, and totals to store. Large tables leave
    the rings less memory.

    Raises:
      ValueError: no ring fits beside the tables.
    """
    each = min(SMEM_BYTES, MOST_SMEM_BYTES - 2 * chunks.table_bytes(top_k)) // chunks.warpgroups
    if each <= 0:
        raise ValueError(
            f"tables of {chunks.tokens} tokens and top_k={top_k} for {chunks.warpgroups} warpgroups"
            " do not fit into the shared memory of a block; pass a smaller chunk."
        )
    itemsize, wire_size = jnp.dtype(dtype).itemsize, jnp.dtype(wire_dtype).itemsize
    piece = piece_of(row, itemsize, FEWEST_ROWS // 2, each, peers=totals)
    elements = piece.padded * row.columns
    stages = PEERS_SUMS if totals else 0
    # Two sums to store, and two totals.
    stored = elements * 2 * (wire_size + totals * itemsize)
    while stages > 2 and each - stored < elements * (stages * wire_size + FEWEST_ROWS * itemsize):
        stages -= 1
    room = (each - stored - elements * stages * wire_size) // (elements * itemsize)
    return Summing(
        row=row,
        piece=piece,
        top_k=top_k,
        stages=stages,
        chunks=chunks,
        dtype=dtype,
        wire_dtype=wire_dtype,
        ring=max(2, min(slots, MOST_SLOTS // chunks.warpgroups, room)),
    )
