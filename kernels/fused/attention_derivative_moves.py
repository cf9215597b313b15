"""The operands and results of attention's derivative, as the kernel's warps move them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed import copies
from stretto.distributed.kernel import block_id
from stretto.distributed.residency import num_blocks_for
from stretto.distributed.schedule import Int, div, rem, share
from stretto.distributed.semaphores import Semaphore
from stretto.distributed.team import Team
from stretto.kernels.engine import stages
from stretto.kernels.engine.attention import derivative_shares
from stretto.kernels.engine.attention.derivative_parts import Queries
from stretto.kernels.engine.attention.derivative_shares import BlockOrder
from stretto.kernels.engine.attention.seeing import Seeing
from stretto.kernels.engine.fuse import Refs
from stretto.kernels.engine.hopper.attention.config import ROWS
from stretto.kernels.engine.hopper.attention.derivative_config import (
    DEFAULT,
    PIECE,
    WARPGROUPS,
    DerivativeTiles,
    queries_of_tile,
)
from stretto.kernels.engine.parts import Ref, Tile
from stretto.kernels.fused.attention_config import Sequence, not_taken, not_whole

NEARLY = 1.01
"""How much longer the busiest block may take with fewer parts."""


def obstacle(q: jax.ShapeDtypeStruct | jax.Array, kv_tokens: int, chunks: int) -> str | None:
    """Why the kernel cannot derive with q, `[batch, tokens, heads, dim]`; None if it can."""
    tokens = (q.shape[1], queries_of_tile(q.shape[3]))
    return not_taken(q) or not_whole(chunks, tokens=tokens, kv_tokens=(kv_tokens, DEFAULT.tile_k))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """One call: its sizes, as the parts of the kernel use them.

    Attributes:
      batch, chunks: sequences, and chunks of each on a device.
      heads, kv_heads, dim: of queries, of keys, size of each.
      parts: of the heads of queries that share a head of keys.
      seeing: which tiles of queries see which keys, on the first device.
    """

    batch: int
    chunks: int
    heads: int
    kv_heads: int
    dim: int
    parts: int
    seeing: Seeing

    @classmethod
    def of(
        cls,
        q: jax.Array,
        k: jax.Array,
        sequence: Sequence,
        config: DerivativeTiles,
        devices: int,
        distance: int,
    ) -> Sizes:
        """Of a call with these operands: see `attention_derivative.derive`."""
        batch, tokens, heads, dim = q.shape
        visible = sequence.visible(
            tokens, k.shape[1], devices, rows=queries_of_tile(dim), block=config.tile_k
        )
        sizes = cls(
            batch=batch,
            chunks=sequence.chunks,
            heads=heads,
            kv_heads=k.shape[2],
            dim=dim,
            parts=config.parts or 1,
            seeing=Seeing(visible=visible, distance=distance),
        )
        return sizes if config.parts is not None else sizes.in_best_parts()

    def in_best_parts(self) -> Sizes:
        """With as many parts as share the work out best, or with fewer ones that do nearly so.

        Each part has derivatives of keys and values of its own in memory.
        """
        group = self.group
        each = [
            dataclasses.replace(self, parts=parts)
            for parts in range(1, group + 1)
            if group % parts == 0
        ]
        longest = [derivative_shares.longest(sizes.seeing, sizes.order()) for sizes in each]
        most = NEARLY * min(longest)
        return next(sizes for sizes, work in zip(each, longest, strict=True) if work <= most)

    @property
    def rows(self) -> int:
        """Chunks of all sequences."""
        return self.batch * self.chunks

    @property
    def group(self) -> int:
        """Heads of queries in a part."""
        return self.heads // (self.kv_heads * self.parts)

    def columns(self, head: Int) -> pl.Slice:
        """The columns of a head."""
        return pl.ds(head * self.dim, self.dim)

    def order(self) -> BlockOrder:
        """The blocks of keys, for the blocks of the grid that share them."""
        visible = self.seeing.visible
        tiles = self.rows * visible.blocks_of_chunk * self.kv_heads * self.parts
        return BlockOrder(
            batch=self.batch,
            chunks=self.chunks,
            blocks=visible.blocks_of_chunk,
            kv_heads=self.kv_heads * self.parts,
            group=self.group,
            num_blocks=num_blocks_for(tiles),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Moves:
    """Operands and results in global memory, and the order of what queries get.

    Attributes:
      sizes: of the call.
      seeing: which tiles of queries see which keys, on this device.
      refs: of the kernel.
      ordered: blocks take turns in adding.
      team: the devices of the sequence, one of which owns the keys; None if this one does.
    """

    sizes: Sizes
    seeing: Seeing
    refs: Refs
    ordered: bool
    team: Team | None

    def load_keys(self, tile: Tile, keys: Ref, values: Ref, barrier: Ref) -> None:
        """Loads the keys and values of a block."""
        kv_head = div(tile.n, self.sizes.parts)
        pairs = (
            self._pieces(tile, keys, self.refs.k, kv_head),
            self._halves(tile, values, self.refs.v, kv_head),
        )
        for stage, window in itertools.chain(*pairs):
            stages.fill(window, stage, barrier)

    def store_keys(self, tile: Tile, keys: Ref, values: Ref) -> None:
        """Starts the copies of their derivatives, to the owner of the keys."""
        kv_head = div(tile.n, self.sizes.parts)
        part = tile.n - kv_head * self.sizes.parts
        k_bar, v_bar = self.refs.k_bar, self.refs.v_bar
        if self.team is not None:
            team = self.team
            k_bar, v_bar = (copies.remote(x, team, self._owner(team)) for x in (k_bar, v_bar))
        of_keys = self._pieces(tile, keys, k_bar.at[part], kv_head)
        of_values = self._halves(tile, values, v_bar.at[part], kv_head)
        for piece, window in itertools.chain(of_keys, of_values):
            plgpu.copy_smem_to_gmem(piece, window, commit_group=False)

    def stored_keys(self, team: Team) -> None:
        """Publishes to the owner of the keys that this block's copies are complete."""
        self.refs.handed_over.signal(peer_id=self._owner(team))

    def finish(self) -> None:
        """Returns once the derivatives of this device's keys are in place."""
        self.refs.handed_over.wait(self.refs.num_blocks)

    def _owner(self, team: Team) -> jax.Array:
        return team.neighbour(self.seeing.distance)

    def load_queries(
        self,
        tile: Tile,
        queries: Queries,
        into: tuple[Ref, Ref, Ref, Ref],
        barrier: Ref,
    ) -> None:
        """Loads a tile of queries, of the result's derivatives, of logsumexps and of row sums."""
        refs, (row, head, first) = self.refs, self._place(tile, queries)
        rows = pl.ds(first, self.seeing.visible.rows)
        for source, stage in zip((refs.q, refs.bar), into[:2], strict=True):
            stages.fill(source.at[row, rows, self.sizes.columns(head)], stage, barrier)
        for source, stage in zip((refs.lse, refs.delta), into[2:], strict=True):
            stages.fill(source.at[row, head, rows], stage, barrier)

    def clear(self, zeros: Ref) -> None:
        """Sets this block's share of the derivatives of queries to zero; waits for all blocks."""
        sizes, visible = self.sizes, self.seeing.visible
        down, across = visible.queries // PIECE, sizes.heads * sizes.dim // PIECE
        block, num_blocks = block_id(), self.refs.num_blocks

        def clear_piece(i: jax.Array, _: None) -> None:
            of_rows = div(block + i * num_blocks, across)
            column = block + i * num_blocks - of_rows * across
            row = div(of_rows, down)
            rows = pl.ds((of_rows - row * down) * PIECE, PIECE)
            window = self.refs.q_bar.at[row, rows, pl.ds(column * PIECE, PIECE)]
            plgpu.copy_smem_to_gmem(zeros.at[0], window, commit_group=False)

        lax.fori_loop(0, share(sizes.rows * down * across, block, num_blocks), clear_piece, None)
        plgpu.commit_smem_to_gmem_group()
        plgpu.wait_smem_to_gmem(0, wait_read_only=False)
        # Publishes this block's share to the adding warps of all blocks.
        self.refs.cleared.signal()
        # All derivatives are zero.
        self.refs.cleared.wait(num_blocks)

    def wait_for_turn(self, tile: Tile, queries: Queries) -> None:
        """Returns once all blocks of keys before this one have added theirs."""
        self._added(tile, queries).wait(self._before(tile, queries))

    def add_queries(self, tile: Tile, queries: Queries, index: int, piece: Ref) -> None:
        """Starts the copy of what a warpgroup gives to the derivative of a tile of queries."""
        row, head, first = self._place(tile, queries)
        down, right = (index, 0) if self.sizes.dim == PIECE else (0, index)
        window = (
            row,
            pl.ds(first + down * PIECE, PIECE),
            pl.ds(head * self.sizes.dim + right * PIECE, PIECE),
        )

        def copy(reduction: Any) -> None:
            target = self.refs.q_bar.at[window]
            plgpu.copy_smem_to_gmem(piece, target, commit_group=False, reduction_op=reduction)

        if not self.ordered:
            copy("add")
            return
        before = self._before(tile, queries)
        pl.when(before == 0)(lambda: copy(None))
        pl.when(before > 0)(lambda: copy("add"))

    def added(self, tile: Tile, queries: Queries) -> None:
        """Publishes that this block has added its part."""
        self._added(tile, queries).signal()

    def _added(self, tile: Tile, queries: Queries) -> Semaphore:
        row, head, _ = self._place(tile, queries)
        return self.refs.added.at[row, head, queries.tile]

    def _before(self, tile: Tile, queries: Queries) -> jax.Array:
        visible = self.seeing.visible
        first = visible.first_query(queries.chunk, queries.tile)
        return jnp.int32(self.seeing.before(first, rem(tile.step, visible.chunks), tile.m))

    def _place(self, tile: Tile, queries: Queries) -> tuple[Int, Int, Int]:
        """(chunk among those of all sequences, head, first row) of a tile of queries."""
        row = tile.step - rem(tile.step, self.sizes.chunks) + queries.chunk
        head = tile.n * self.sizes.group + queries.head
        return row, head, queries.tile * self.seeing.visible.rows

    def _halves(self, tile: Tile, stage: Ref, source: Ref, head: Int) -> Iterator[tuple[Ref, Ref]]:
        """Rows of 64 of a block, in shared and in global memory."""
        for half in range(WARPGROUPS):
            rows = pl.ds(tile.m * self.seeing.visible.block + half * ROWS, ROWS)
            yield stage.at[half], source.at[tile.step, rows, self.sizes.columns(head)]

    def _pieces(self, tile: Tile, stage: Ref, source: Ref, head: Int) -> Iterator[tuple[Ref, Ref]]:
        """The same in pieces of 64 columns."""
        for half, column in itertools.product(range(WARPGROUPS), range(self.sizes.dim // PIECE)):
            rows = pl.ds(tile.m * self.seeing.visible.block + half * ROWS, ROWS)
            columns = pl.ds(head * self.sizes.dim + column * PIECE, PIECE)
            yield stage.at[half, column], source.at[tile.step, rows, columns]
