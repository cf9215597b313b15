"""Attention over a split sequence, the peers' keys and values arriving under the attention to others.

Each device attends with its own queries to its own keys first, then to those of its successors on
the ring. One spare warp of every block fetches the peers' keys and values at the same time, from the
peers' operands into a local buffer: one head of keys after another, as the tiles want them. A tile
waits for a chunk of a peer's head when it comes to it. Chunks that no query of a tile sees are
passed over, and need not have arrived.

| object | written or signalled by | waited for by | count | proves |
|---|---|---|---|---|
| `gathered`, both at `s - 1` | the pulling warps | | | keys and values of the `s`-th successor |
| `received[s - 1, c, h]` | each pulling warp, per piece | the polling warps, a segment | pieces of a chunk, of keys and of values | chunk `c` of its head `h` is in place |
| `released` | the peers' pulling warps, once each | block 0's pulling warp | blocks x peers | no peer reads this device's keys and values any more |

Peers' operands are ready once the pulling warp has waited for the peers' start (`handshake`). A
chunk's number `c` counts those of all sequences of the batch.
"""  # noqa: E501

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed.residency import num_blocks_for
from stretto.distributed.schedule import Int, div
from stretto.distributed.semaphores import SemaphoreArray
from stretto.distributed.team import Team
from stretto.kernels.engine import stages
from stretto.kernels.engine.attention import documents, even_shares
from stretto.kernels.engine.attention.documents import Documents
from stretto.kernels.engine.attention.order import AttentionOrder, EvenOrder, SortedOrder
from stretto.kernels.engine.attention.parts import AttentionParts
from stretto.kernels.engine.attention.visible import SeenByPlace
from stretto.kernels.engine.fuse import Refs, fuse
from stretto.kernels.engine.hopper.attention.mainloop import Attention
from stretto.kernels.engine.parts import Product, Ref, Sink, Tile, Transfer
from stretto.kernels.engine.transfers import Buffers
from stretto.kernels.fused.attention_config import Config, Sequence, Sizes, obstacle
from stretto.kernels.fused.attention_keys import Keys

type Pair = tuple[jax.Array, jax.Array]


def attend_and_keep(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    team: Team | None,
    sequence: Sequence,
    *,
    scale: float,
    config: Config,
    segments: Pair | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array, Pair | None]:
    """Attention to the keys of all devices of `team`, of one device alone without one.

    Args:
      q: `[batch, tokens, heads, dim]`, bfloat16 or float16.
      k, v: `[batch, kv_tokens, kv_heads, dim]`, of the same type; kv_heads divides heads.
      team: the devices, in the order of the sequence.
      sequence: how tokens lie in it.
      scale: of the scores, above 0.
      config: of the kernel.
      segments: of documents packed into the sequence: int32 `[batch, tokens]` of q, and `[devices,
        batch, kv_tokens]` of all devices' keys, this device's first and then its successors' on
        the ring. A query sees the keys of its own document.
      interpret: as `fuse` takes it.

    Returns:
      (q's shape and type, float32 logsumexp `[batch, heads, tokens]`, what was pulled). The latter
      is None of one device; else keys and values, each `[peers, batch * kv_tokens, kv_heads * dim]`
      of the successors on the ring, undefined in chunks that no query sees.

    Raises:
      ValueError: a configuration that cannot be built.
      NotImplementedError: operands that the kernel does not take, or another scale.
    """
    found = obstacle(q, k.shape[1], sequence.chunks, config.tiles)
    if found is None and not 0 < scale < math.inf:
        found = f"scale={scale} must be above 0."
    if found is not None:
        raise NotImplementedError(f"attention: {found}")
    config.check()
    config.check_heads(q.shape[3], q.dtype.itemsize)
    several = None if team is None or team.is_alone else team
    sizes = Sizes.of(q, k, 1 if several is None else several.size, sequence, config)
    return _launch(q, k, v, several, sizes, scale, segments, interpret)


def attend(*operands: Any, **how: Any) -> tuple[jax.Array, jax.Array]:
    """The first two results of `attend_and_keep`, of the same arguments."""
    return attend_and_keep(*operands, **how)[:2]


def _launch(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    team: Team | None,
    sizes: Sizes,
    scale: float,
    segments: Pair | None,
    interpret: Any,
) -> tuple[jax.Array, jax.Array, Pair | None]:
    config, heads, queries = sizes.config, sizes.heads, sizes.visible.queries
    rows = sizes.batch * sizes.chunks
    keys = (sizes.batch * k.shape[1], sizes.kv_heads * sizes.dim)
    outs: dict[str, Any] = dict(
        out=jax.ShapeDtypeStruct((rows, queries, heads * sizes.dim), q.dtype),
        lse=jax.ShapeDtypeStruct((rows, heads, queries), jnp.float32),
    )
    moving: dict[str, Any] = {}
    operands = dict(
        q=q.reshape(rows, queries, heads * sizes.dim), k=k.reshape(keys), v=v.reshape(keys)
    )
    if segments is not None:
        operands.update(_documents(segments, team, sizes))
    elif sizes.is_uneven:
        order = _in_turn(sizes, num_blocks_for(sizes.num_tiles))
        operands["shares"] = jnp.asarray(even_shares.table(sizes.visible, order))
    if team is not None:
        outs["gathered"] = (jax.ShapeDtypeStruct((sizes.peers, *keys), k.dtype),) * 2
        received = SemaphoreArray((sizes.peers, rows, sizes.kv_heads), local=True)
        piece = Buffers(config.pull_slots, config.pull_rows, sizes.dim, k.dtype)
        moving = dict(semaphores=dict(received=received), buffers=piece, waits=True)
    product = Product(lhs=k.dtype, rhs=v.dtype, out=q.dtype)
    found = fuse(
        lambda refs: _parts(refs, team, sizes, scale, is_packed=segments is not None),
        name="attention",
        team=team,
        mainloop=Attention(config.tiles, product, sizes.dim),
        num_tiles=sizes.num_tiles,
        operands=operands,
        outs=outs,
        # Powers of two by the hardware's own instruction: weights are rounded to 16 bits anyway.
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        **moving,
    )
    lse = found["lse"].reshape(sizes.batch, sizes.chunks, heads, queries)
    lse = lse.transpose(0, 2, 1, 3).reshape(sizes.batch, heads, sizes.chunks * queries)
    return found["out"].reshape(q.shape), lse, found.get("gathered")


def _documents(segments: Pair, team: Team | None, sizes: Sizes) -> dict[str, jax.Array]:
    """The operands of documents, by name: these of queries, of keys, and what tiles see of them."""
    visible = dataclasses.replace(sizes.visible, device=0 if team is None else team.device_id())
    of_queries, of_keys = segments
    of_queries = of_queries.reshape(sizes.batch * sizes.chunks, visible.queries)
    of_keys = of_keys.transpose(1, 0, 2).reshape(sizes.batch, visible.segments * visible.keys)
    table = documents.table(of_queries, of_keys, visible)
    places = documents.most_work_first(table)
    return dict(of_queries=of_queries, of_keys=of_keys, ranges=table, places=places)


def _parts(
    refs: Refs, team: Team | None, sizes: Sizes, scale: float, *, is_packed: bool
) -> AttentionParts:
    device = 0 if team is None else team.device_id()
    visible = dataclasses.replace(sizes.visible, device=device)
    packed = None
    if is_packed:
        packed = Documents(
            visible=visible, table=refs.ranges, queries=refs.of_queries, keys=refs.of_keys
        )
    seen = packed or SeenByPlace(visible)
    keys = Keys(sizes=sizes, team=team, visible=visible, seen=seen, refs=refs)
    queries = _Queries(sizes=sizes, refs=refs)
    return AttentionParts(
        **_order(refs, device, sizes, is_packed=is_packed),
        k_tiles=visible.segments,
        lhs=keys.keys(),
        rhs=keys.values(),
        sink=Sink(store=lambda tile, piece, row, _: queries.store(tile, piece, row)),
        transfer=None if team is None else Transfer(run=keys.pull),
        queries=queries.load,
        store_logsumexp=queries.store_logsumexp,
        visible=visible,
        exponent=scale * math.log2(math.e),
        documents=packed,
    )


def _in_turn(sizes: Sizes, num_blocks: int) -> AttentionOrder:
    """The tiles, which so many blocks take in turn."""
    return AttentionOrder(
        batch=sizes.batch,
        chunks=sizes.chunks,
        tiles=sizes.visible.tiles_of_chunk,
        kv_heads=sizes.kv_heads,
        group=sizes.group,
        num_blocks=num_blocks,
    )


def _order(refs: Refs, device: Int, sizes: Sizes, *, is_packed: bool) -> dict[str, Any]:
    """The fields of the kernel's parts that say which tiles a block makes."""
    tiles = _in_turn(sizes, refs.num_clusters)
    if is_packed:
        order = SortedOrder(
            tiles=tiles,
            of_step=tiles.tiles,
            heads=sizes.heads,
            place=lambda at: refs.places[at],
        )
        return dict(order=order, ahead=True)
    if not sizes.is_uneven:
        return dict(order=tiles)

    def entry(index: Int) -> Int:
        row = div(index, tiles.num_blocks)
        return refs.shares[device, row + 1, index - row * tiles.num_blocks]

    return dict(
        order=EvenOrder(tiles=tiles, entry=entry),
        own_tiles=lambda block: refs.shares[device, 0, block],
        ahead=True,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Queries:
    """Queries, and where their results go; rows of a tile behind the end of its chunk are none."""

    sizes: Sizes
    refs: Refs

    def load(self, tile: Tile, row: Int, rows: int, stage: Ref, barrier: Ref) -> None:
        """Loads rows of a tile; in place of those behind the chunk's end, the chunk's last ones."""
        first = jnp.minimum(self._row(tile, row), self.sizes.visible.queries - rows)
        window = tile.step, pl.ds(first, rows), self.sizes.columns(tile.n)
        stages.fill(self.refs.q.at[window], stage, barrier)

    def store(self, tile: Tile, piece: Ref, row: Int) -> None:
        """Starts the copy of rows of a result."""
        first, rows = self._row(tile, row), piece.shape[0]

        @pl.when(first < self.sizes.visible.queries)
        def _():
            window = tile.step, pl.ds(first, rows), self.sizes.columns(tile.n)
            plgpu.copy_smem_to_gmem(piece, self.refs.out.at[window], commit_group=False)

    def store_logsumexp(self, tile: Tile, piece: Ref, row: Int) -> None:
        """Starts the copy of their logsumexps."""
        first, rows = self._row(tile, row), piece.shape[0]

        @pl.when(first < self.sizes.visible.queries)
        def _():
            window = tile.step, tile.n, pl.ds(first, rows)
            plgpu.copy_smem_to_gmem(piece, self.refs.lse.at[window], commit_group=False)

    def _row(self, tile: Tile, row: Int) -> Int:
        """A row of a tile, within its chunk."""
        return tile.m * self.sizes.visible.rows + row
