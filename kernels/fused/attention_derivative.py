"""The derivative of attention to the keys of one device, from the logsumexp of all keys.

A block of the grid has 128 keys and values, and goes through the tiles of queries that see them, of
all heads that share them: the derivatives of keys and values are added up in registers. Those of
queries are added up in memory, in float32, by one block of keys after another:

| object | written or signalled by | waited for by | count | proves |
|---|---|---|---|---|
| `added[r, h, t]` | the adding warps, once a block of keys that the tile sees | the same | blocks of keys before this one | these have added what they give to tile `t` |

The order of the blocks is that of their places, so the sums have the same bits in every run. The
first block stores its part, so nothing must be zero at the start. A block of keys waits only for
blocks with smaller numbers, of which every block of the grid takes its own in order: the smallest
one that is not complete waits for none.
"""  # noqa: E501

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed.kernel import num_blocks_for
from stretto.distributed.schedule import Int, div, rem
from stretto.distributed.semaphores import Semaphore, SemaphoreArray
from stretto.kernels.engine import stages
from stretto.kernels.engine.attention import derivative_shares
from stretto.kernels.engine.attention.derivative_parts import DerivativeParts, Queries
from stretto.kernels.engine.attention.derivative_shares import BlockOrder
from stretto.kernels.engine.attention.order import EvenOrder
from stretto.kernels.engine.attention.seeing import Seeing
from stretto.kernels.engine.attention.visible import VisibleKeys
from stretto.kernels.engine.fuse import Refs, fuse
from stretto.kernels.engine.hopper.attention.config import ROWS
from stretto.kernels.engine.hopper.attention.derivative_config import (
    PIECE,
    WARPGROUPS,
    DerivativeTiles,
    queries_of_tile,
)
from stretto.kernels.engine.hopper.attention.derivative_mainloop import Derivative
from stretto.kernels.engine.parts import Product, Ref, Sink, Stream, Tile
from stretto.kernels.fused.attention_config import DIMS, TYPES, Sequence


def obstacle(
    q: jax.ShapeDtypeStruct | jax.Array, kv_tokens: int, chunks: int, tiles: DerivativeTiles
) -> str | None:
    """Why the kernel cannot derive with q, `[batch, tokens, heads, dim]`; None if it can."""
    _, tokens, _, dim = q.shape
    if str(q.dtype) not in TYPES:
        return f"the kernel takes {' and '.join(TYPES)}, not {q.dtype}."
    if dim not in DIMS:
        return f"the kernel takes heads of size {' and '.join(map(str, DIMS))}, not {dim}."
    given = (("tokens", tokens, queries_of_tile(dim)), ("kv_tokens", kv_tokens, tiles.tile_k))
    for name, count, multiple in given:
        if count % (chunks * multiple):
            return (
                f"{name}={count} of a device must be a multiple of {chunks * multiple},"
                f" {multiple} for each of its chunks; pad the sequence."
            )
    return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Sizes:
    """One call: its sizes, and which queries see which keys on the first device."""

    batch: int
    chunks: int
    heads: int
    kv_heads: int
    dim: int
    seeing: Seeing

    @property
    def rows(self) -> int:
        """Chunks of all sequences."""
        return self.batch * self.chunks

    @property
    def group(self) -> int:
        """Heads of queries for each head of keys."""
        return self.heads // self.kv_heads

    def order(self, num_blocks: int) -> BlockOrder:
        """The blocks of keys."""
        visible = self.seeing.visible
        return BlockOrder(
            batch=self.batch,
            chunks=self.chunks,
            blocks=visible.blocks_of_chunk,
            kv_heads=self.kv_heads,
            group=self.group,
            num_blocks=num_blocks,
        )


def derive(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out_bar: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    sequence: Sequence,
    *,
    scale: float,
    config: DerivativeTiles,
    device: Int = 0,
    devices: int = 1,
    distance: int = 0,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Derivatives by the queries, keys and values of attention's share of one device's keys.

    Args:
      q, out_bar: `[batch, tokens, heads, dim]`, bfloat16 or float16, and the result's cotangent.
      k, v: `[batch, kv_tokens, kv_heads, dim]`, of the same type; kv_heads divides heads.
      lse: of the scores of all keys, float32 `[batch, heads, tokens]`; minus infinity of none.
      delta: sums by row of the result times its cotangent, less that of the logsumexp; likewise.
      sequence: how tokens lie in it.
      scale: of the scores, above 0.
      config: of the kernel.
      device, devices: the one that has the queries, of those that hold the sequence.
      distance: how many places further on the one is that has the keys.
      interpret: as `fuse` takes it.

    Returns:
      (float32 of q's shape, k's shape and type, v's).

    Raises:
      NotImplementedError: operands that the kernel does not take, or another scale.
    """
    found = obstacle(q, k.shape[1], sequence.chunks, config)
    if found is None and not 0 < scale < math.inf:
        found = f"scale={scale} must be above 0."
    if found is not None:
        raise NotImplementedError(f"the derivative of attention: {found}")
    sizes = _sizes(q, k, sequence, config, devices, distance)
    own_device = jnp.asarray(device, jnp.int32)
    order = sizes.order(num_blocks_for(sizes.order(1).num_tiles))
    visible = sizes.seeing.visible
    of_devices = jnp.asarray(derivative_shares.table(sizes.seeing, order))
    rows = sizes.rows
    rows_of = lambda x, heads: x.reshape(rows, -1, heads * sizes.dim)  # noqa: E731
    by_chunk = lambda x: (  # noqa: E731
        x.reshape(sizes.batch, sizes.heads, sizes.chunks, -1)
        .transpose(0, 2, 1, 3)
        .reshape(rows, sizes.heads, -1)
    )
    operands = dict(
        q=rows_of(q, sizes.heads),
        k=rows_of(k, sizes.kv_heads),
        v=rows_of(v, sizes.kv_heads),
        bar=rows_of(out_bar, sizes.heads),
        # What accumulators begin with: of a row without keys all weights are 0.
        lse=by_chunk(jnp.where(lse == -jnp.inf, -jnp.inf, -lse / scale)),
        delta=by_chunk(-delta),
        shares=of_devices[own_device],
        device=own_device[None],
    )
    outs = dict(
        q_bar=jax.ShapeDtypeStruct(operands["q"].shape, jnp.float32),
        k_bar=jax.ShapeDtypeStruct(operands["k"].shape, k.dtype),
        v_bar=jax.ShapeDtypeStruct(operands["v"].shape, v.dtype),
    )
    added = SemaphoreArray((rows, sizes.heads, visible.queries // visible.rows), local=True)
    product = Product(lhs=k.dtype, rhs=v.dtype, out=q.dtype)
    made = fuse(
        lambda refs: _parts(refs, sizes, scale),
        name="attention_derivative",
        team=None,
        mainloop=Derivative(config, product, sizes.dim),
        num_tiles=order.num_tiles,
        operands=operands,
        outs=outs,
        semaphores=dict(added=added),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )
    seen = _seen(sizes, own_device)
    q_bar = jnp.where(seen, made["q_bar"].reshape(q.shape) * scale, 0)
    return q_bar, made["k_bar"].reshape(k.shape), made["v_bar"].reshape(v.shape)


def _sizes(
    q: jax.Array,
    k: jax.Array,
    sequence: Sequence,
    config: DerivativeTiles,
    devices: int,
    distance: int,
) -> _Sizes:
    batch, tokens, heads, dim = q.shape
    visible = VisibleKeys(
        device=0,
        devices=devices,
        chunks=sequence.chunks,
        queries=tokens // sequence.chunks,
        keys=k.shape[1] // sequence.chunks,
        rows=queries_of_tile(dim),
        block=config.tile_k,
        causal=sequence.causal,
        window=sequence.window,
    )
    return _Sizes(
        batch=batch,
        chunks=sequence.chunks,
        heads=heads,
        kv_heads=k.shape[2],
        dim=dim,
        seeing=Seeing(visible=visible, distance=distance),
    )


def _seen(sizes: _Sizes, device: jax.Array) -> jax.Array | bool:
    """Which queries see any key, bool `[1, tokens, 1, 1]`; nothing is stored for the others."""
    visible = dataclasses.replace(sizes.seeing.visible, device=device)
    if not visible.causal:
        return True
    seeing = dataclasses.replace(sizes.seeing, visible=visible)
    tiles = jnp.arange(visible.queries // visible.rows, dtype=jnp.int32)
    of_chunks = [seeing.is_seen(visible.first_query(c, tiles)) for c in range(visible.chunks)]
    seen = jnp.repeat(jnp.concatenate(of_chunks), visible.rows)
    return seen[None, :, None, None]


def _parts(refs: Refs, sizes: _Sizes, scale: float) -> DerivativeParts:
    seeing = dataclasses.replace(
        sizes.seeing, visible=dataclasses.replace(sizes.seeing.visible, device=refs.device[0])
    )
    tiles = sizes.order(refs.num_clusters)

    def entry(index: Int) -> Int:
        row = div(index, tiles.num_blocks)
        return refs.shares[row + 1, index - row * tiles.num_blocks]

    moves = _Moves(sizes=sizes, seeing=seeing, refs=refs)
    unused = Stream(load=lambda *_: None)
    return DerivativeParts(
        order=EvenOrder(tiles=tiles, entry=entry),
        own_tiles=lambda block: refs.shares[0, block],
        k_tiles=1,
        lhs=unused,
        rhs=unused,
        sink=Sink(store=lambda *_: None),
        load_keys=moves.load_keys,
        load_queries=moves.load_queries,
        store_keys=moves.store_keys,
        wait_for_turn=moves.wait_for_turn,
        add_queries=moves.add_queries,
        added=moves.added,
        seeing=seeing,
        group=sizes.group,
        exponent=scale * math.log2(math.e),
        scale=scale,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Moves:
    """Where operands and results are in global memory."""

    sizes: _Sizes
    seeing: Seeing
    refs: Refs

    def load_keys(self, tile: Tile, keys: Ref, values: Ref, barrier: Ref) -> None:
        """Loads the keys and values of a block."""
        pairs = self._pieces(tile, keys, self.refs.k), self._halves(tile, values, self.refs.v)
        for stage, window in itertools.chain(*pairs):
            stages.fill(window, stage, barrier)

    def store_keys(self, tile: Tile, keys: Ref, values: Ref) -> None:
        """Starts the copies of their derivatives."""
        of_keys = self._pieces(tile, keys, self.refs.k_bar)
        of_values = self._halves(tile, values, self.refs.v_bar)
        for piece, window in itertools.chain(of_keys, of_values):
            plgpu.copy_smem_to_gmem(piece, window, commit_group=False)

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
            stages.fill(source.at[row, rows, self._columns(head)], stage, barrier)
        for source, stage in zip((refs.lse, refs.delta), into[2:], strict=True):
            stages.fill(source.at[row, head, rows], stage, barrier)

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
        before = self._before(tile, queries)

        def copy(reduction: Any) -> None:
            target = self.refs.q_bar.at[window]
            plgpu.copy_smem_to_gmem(piece, target, commit_group=False, reduction_op=reduction)

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

    def _columns(self, head: Int) -> pl.Slice:
        return pl.ds(head * self.sizes.dim, self.sizes.dim)

    def _halves(self, tile: Tile, stage: Ref, source: Ref) -> Iterator[tuple[Ref, Ref]]:
        """Rows of 64 of a block, in shared and in global memory."""
        for half in range(WARPGROUPS):
            rows = pl.ds(tile.m * self.seeing.visible.block + half * ROWS, ROWS)
            yield stage.at[half], source.at[tile.step, rows, self._columns(tile.n)]

    def _pieces(self, tile: Tile, stage: Ref, source: Ref) -> Iterator[tuple[Ref, Ref]]:
        """The same in pieces of 64 columns."""
        for half, column in itertools.product(range(WARPGROUPS), range(self.sizes.dim // PIECE)):
            rows = pl.ds(tile.m * self.seeing.visible.block + half * ROWS, ROWS)
            columns = pl.ds(tile.n * self.sizes.dim + column * PIECE, PIECE)
            yield stage.at[half, column], source.at[tile.step, rows, columns]
