"""Attention over a split sequence, the peers' keys and values arriving under the attention to others.

Each device attends with its own queries to its own keys first, then to those of its successors on
the ring. One spare warp of every block fetches the peers' keys and values at the same time, from the
peers' operands into a local buffer: one head of keys after another, as the tiles want them. A tile
waits for a chunk of a peer's head when it comes to it. Chunks that no query of a tile sees are
passed over, and need not have arrived.

| object | written or signalled by | waited for by | count | proves |
|---|---|---|---|---|
| `gathered`, `2 (s - 1)` and the next | the pulling warps | | | keys and values of the `s`-th successor |
| `received[s - 1, c, h]` | each pulling warp, per piece | the polling warps, a segment | pieces of a chunk, of keys and of values | chunk `c` of its head `h` is in place |
| `released` | the peers' pulling warps, once each | block 0's pulling warp | blocks x peers | no peer reads this device's keys and values any more |

Peers' operands are ready once the pulling warp has waited for the peers' start (`handshake`). A
chunk's number `c` counts those of all sequences of the batch.
"""  # noqa: E501

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed import copies
from stretto.distributed.schedule import Int, div, rem
from stretto.distributed.semaphores import SemaphoreArray
from stretto.distributed.team import Team
from stretto.kernels.engine import stages, transfers
from stretto.kernels.engine.attention.order import AttentionOrder
from stretto.kernels.engine.attention.parts import AttentionParts
from stretto.kernels.engine.attention.visible import VisibleKeys
from stretto.kernels.engine.fuse import Refs, fuse
from stretto.kernels.engine.hopper.attention.config import DIMS, LARGE, ROWS, TALL, AttentionTiles
from stretto.kernels.engine.hopper.attention.mainloop import Attention
from stretto.kernels.engine.parts import Arrival, Load, Product, Ref, Sink, Stream, Tile, Transfer
from stretto.kernels.engine.shared_memory import SMEM_BYTES
from stretto.kernels.engine.transfers import Buffers
from stretto.kernels.fused.obstacles import check_pull_slots
from stretto.kernels.problem.problem import Problem

TYPES = ("bfloat16", "float16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How the kernel is cut up.

    Attributes:
      tiles: of attention.
      pull_rows: keys, or values, of a head that the pulling warp fetches at once.
      pull_slots: such pieces on their way at once, per block.
    """

    tiles: AttentionTiles = LARGE
    pull_rows: int = 32
    pull_slots: int = 3

    def check(self, problem: Problem | None = None) -> None:
        """Raises ValueError unless the kernel can be built so for `problem`."""
        self.tiles.check()
        check_pull_slots(self.pull_slots)
        if self.pull_rows < 1 or self.tiles.tile_k % self.pull_rows:
            raise ValueError(
                f"pull_rows={self.pull_rows} must divide tile_k={self.tiles.tile_k}, of which"
                " chunks of keys are multiples."
            )
        if problem is None:
            return
        dim = problem.sizes["dim"]
        if self.tiles.warpgroups > 2 and dim > min(DIMS):
            raise ValueError(
                f"warpgroups={self.tiles.warpgroups} do not have the registers for heads of"
                f" dim={dim}; pass warpgroups=2."
            )
        itemsize = problem.types.itemsize
        needed = self.tiles.smem_bytes(dim, itemsize)
        needed += self.pull_slots * self.pull_rows * dim * itemsize
        if needed > SMEM_BYTES:
            raise ValueError(
                f"the kernel needs {needed} bytes of shared memory and a block has {SMEM_BYTES};"
                " take fewer stages or slots."
            )

    @staticmethod
    def candidates(problem: Problem | None = None) -> Iterator[Config]:
        """What the tuner tries, for one problem or for all; likely ones first."""
        if problem is None or problem.sizes["dim"] == min(DIMS):
            yield Config(tiles=dataclasses.replace(TALL, num_stages=3))
            yield Config(tiles=dataclasses.replace(LARGE, num_stages=3))
        if problem is None or problem.sizes["dim"] > min(DIMS):
            yield Config()
            yield Config(pull_rows=64, pull_slots=2)


def default_config(problem: Problem) -> Config:
    """The configuration for a problem that no table has."""
    return next(Config.candidates(problem))


class Sequence(NamedTuple):
    """How a device's tokens lie in the sequence, and what they see.

    Attributes:
      chunks: of a device: 1, or 2 in zigzag.
      causal, window: as `VisibleKeys` has them.
    """

    chunks: int = 1
    causal: bool = False
    window: int | None = None


def obstacle(
    q: jax.ShapeDtypeStruct | jax.Array, kv_tokens: int, chunks: int, tiles: AttentionTiles
) -> str | None:
    """Why the kernel cannot attend with q, `[batch, tokens, heads, dim]`; None if it can."""
    _, tokens, _, dim = q.shape
    if str(q.dtype) not in TYPES:
        return f"the kernel takes {' and '.join(TYPES)}, not {q.dtype}."
    if dim not in DIMS:
        return f"the kernel takes heads of size {' and '.join(map(str, DIMS))}, not {dim}."
    for name, count, multiple in (("tokens", tokens, ROWS), ("kv_tokens", kv_tokens, tiles.tile_k)):
        if count % (chunks * multiple):
            return (
                f"{name}={count} of a device must be a multiple of {chunks * multiple},"
                f" {multiple} for each of its chunks; pad the sequence."
            )
    return None


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    team: Team | None,
    sequence: Sequence,
    *,
    scale: float,
    config: Config,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention to the keys of all devices of `team`, of one device alone without one.

    Args:
      q: `[batch, tokens, heads, dim]`, bfloat16 or float16.
      k, v: `[batch, kv_tokens, kv_heads, dim]`, of the same type; kv_heads divides heads.
      team: the devices, in the order of the sequence.
      sequence: how tokens lie in it.
      scale: of the scores, above 0.
      config: of the kernel.
      interpret: as `fuse` takes it.

    Returns:
      (q's shape and type, float32 logsumexp `[batch, heads, tokens]`).

    Raises:
      NotImplementedError: operands that the kernel does not take, or another scale.
    """
    found = obstacle(q, k.shape[1], sequence.chunks, config.tiles)
    if found is None and not 0 < scale < math.inf:
        found = f"scale={scale} must be above 0."
    if found is not None:
        raise NotImplementedError(f"attention: {found}")
    config.check()
    call = _Attention.of(q, k, None if team is None or team.is_alone else team, sequence, config)
    return call.run(q, k, v, scale, interpret)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Attention:
    """One call: its sizes, as the parts of the kernel use them.

    Attributes:
      team: the devices; None if there is one.
      config: of the kernel.
      batch, chunks: sequences, and chunks of each on a device.
      heads, kv_heads, dim: of queries, of keys, size of each.
      visible: which keys tiles see, its device left out.
      dtype: of all operands.
    """

    team: Team | None
    config: Config
    batch: int
    chunks: int
    heads: int
    kv_heads: int
    dim: int
    visible: VisibleKeys
    dtype: Any

    @classmethod
    def of(
        cls, q: jax.Array, k: jax.Array, team: Team | None, sequence: Sequence, config: Config
    ) -> _Attention:
        """The call with these operands."""
        batch, tokens, heads, dim = q.shape
        visible = VisibleKeys(
            device=0,
            devices=1 if team is None else team.size,
            chunks=sequence.chunks,
            queries=tokens // sequence.chunks,
            keys=k.shape[1] // sequence.chunks,
            rows=config.tiles.tile_m,
            block=config.tiles.tile_k,
            causal=sequence.causal,
            window=sequence.window,
        )
        return cls(
            team=team,
            config=config,
            batch=batch,
            chunks=sequence.chunks,
            heads=heads,
            kv_heads=k.shape[2],
            dim=dim,
            visible=visible,
            dtype=q.dtype,
        )

    @property
    def group(self) -> int:
        """Heads of queries for each head of keys."""
        return self.heads // self.kv_heads

    @property
    def peers(self) -> int:
        """The other devices."""
        return self.visible.devices - 1

    @property
    def pieces_of_chunk(self) -> int:
        """Pieces of a head's keys and values of a chunk."""
        return 2 * self.visible.keys // self.config.pull_rows

    @property
    def num_tiles(self) -> int:
        """Tiles of queries."""
        return self.batch * self.heads * self.chunks * self.visible.tiles_of_chunk

    def run(
        self, q: jax.Array, k: jax.Array, v: jax.Array, scale: float, interpret: Any
    ) -> tuple[jax.Array, jax.Array]:
        """Launches the kernel."""
        rows, queries = self.batch * self.chunks, self.visible.queries
        keys = (self.batch * k.shape[1], self.kv_heads * self.dim)
        outs = dict(
            out=jax.ShapeDtypeStruct((rows, queries, self.heads * self.dim), q.dtype),
            lse=jax.ShapeDtypeStruct((rows, self.heads, queries), jnp.float32),
        )
        moving = {}
        if self.team is not None:
            outs["gathered"] = jax.ShapeDtypeStruct((2 * self.peers, *keys), k.dtype)
            received = SemaphoreArray((self.peers, rows, self.kv_heads), local=True)
            piece = Buffers(self.config.pull_slots, self.config.pull_rows, self.dim, k.dtype)
            moving = dict(semaphores=dict(received=received), buffers=piece, waits=True)
        product = Product(lhs=k.dtype, rhs=v.dtype, out=q.dtype)
        found = fuse(
            lambda refs: self._parts(refs, scale),
            name="attention",
            team=self.team,
            mainloop=Attention(self.config.tiles, product, self.dim),
            num_tiles=self.num_tiles,
            operands=dict(
                q=q.reshape(rows, queries, self.heads * self.dim),
                k=k.reshape(keys),
                v=v.reshape(keys),
            ),
            outs=outs,
            # Powers of two by the unit that has them, as precise as weights of 16 bits need them.
            compiler_params=plgpu.CompilerParams(approx_math=True),
            interpret=interpret,
            **moving,
        )
        lse = found["lse"].reshape(self.batch, self.chunks, self.heads, queries)
        lse = lse.transpose(0, 2, 1, 3).reshape(self.batch, self.heads, self.chunks * queries)
        return found["out"].reshape(q.shape), lse

    def _parts(self, refs: Refs, scale: float) -> AttentionParts:
        device = 0 if self.team is None else self.team.device_id()
        visible = dataclasses.replace(self.visible, device=device)
        arrival = None if self.team is None else self._arrival(refs, visible)
        return AttentionParts(
            order=AttentionOrder(
                batch=self.batch,
                chunks=self.chunks,
                tiles=self.visible.tiles_of_chunk,
                kv_heads=self.kv_heads,
                group=self.group,
                num_blocks=refs.num_clusters,
            ),
            k_tiles=visible.segments,
            lhs=Stream(load=self._load(refs, refs.k, 0), arrival=arrival),
            rhs=Stream(load=self._load(refs, refs.v, 1)),
            sink=Sink(store=lambda tile, piece, row, _: self._store(refs.out, tile, piece, row)),
            transfer=None if self.team is None else Transfer(run=lambda: self._pull(refs)),
            queries=lambda *given: self._queries(refs.q, *given),
            store_logsumexp=lambda tile, piece, row: self._store_lse(refs.lse, tile, piece, row),
            visible=visible,
            exponent=scale * math.log2(math.e),
        )

    # --- Queries and results ----------------------------------------------------------------------

    def _queries(self, q: Ref, tile: Tile, row: int, rows: int, stage: Ref, barrier: Ref) -> None:
        """Loads rows of a tile; in place of those behind the chunk's end, its last ones."""
        first = jnp.minimum(tile.m * self.visible.rows + row, self.visible.queries - rows)
        stages.fill(q.at[tile.step, pl.ds(first, rows), self._columns(tile.n)], stage, barrier)

    def _store(self, out: Ref, tile: Tile, piece: Ref, row: int) -> None:
        first = tile.m * self.visible.rows + row

        @pl.when(first < self.visible.queries)
        def _():
            target = out.at[tile.step, pl.ds(first, piece.shape[0]), self._columns(tile.n)]
            plgpu.copy_smem_to_gmem(piece, target, commit_group=False)

    def _store_lse(self, lse: Ref, tile: Tile, piece: Ref, row: int) -> None:
        first = tile.m * self.visible.rows + row

        @pl.when(first < self.visible.queries)
        def _():
            target = lse.at[tile.step, tile.n, pl.ds(first, piece.shape[0])]
            plgpu.copy_smem_to_gmem(piece, target, commit_group=False)

    def _columns(self, head: Int) -> pl.Slice:
        return pl.ds(head * self.dim, self.dim)

    # --- Keys and values --------------------------------------------------------------------------

    def _load(self, refs: Refs, own: Ref, kind: int) -> Load:
        """Loads blocks of keys, of `kind` 0, or of values, of 1."""
        visible = self.visible

        def load(tile: Tile, place: Int, stage: Ref, barrier: Ref) -> None:
            segment = div(place, visible.blocks_of_chunk)
            block = place - segment * visible.blocks_of_chunk
            row = self._chunk(tile, segment) * visible.keys + block * visible.block
            window = pl.ds(row, visible.block), self._columns(div(tile.n, self.group))
            if self.team is None:
                stages.fill(own.at[window], stage, barrier)
                return
            step = visible.step(segment)
            pl.when(step == 0)(lambda: stages.fill(own.at[window], stage, barrier))

            @pl.when(step > 0)
            def _():
                stages.fill(refs.gathered.at[2 * step - 2 + kind, *window], stage, barrier)

        return load

    def _chunk(self, tile: Tile, segment: Int) -> Int:
        """The chunk of keys of a segment, among those of all sequences."""
        return tile.step - rem(tile.step, self.chunks) + self.visible.chunk(segment)

    def _arrival(self, refs: Refs, visible: VisibleKeys) -> Arrival:
        """Waits for the keys and values of a segment."""

        def wait(tile: Tile, segment: Int) -> None:
            step = visible.step(segment)
            query = visible.first_query(rem(tile.step, self.chunks), tile.m)
            first, last = visible.blocks(query, segment)

            @pl.when((step > 0) & (first < last))
            def _():
                head = div(tile.n, self.group)
                # All blocks' pieces of this chunk, of keys and of values, are in place.
                arrived = refs.received.at[step - 1, self._chunk(tile, segment), head]
                arrived.wait(self.pieces_of_chunk)

        # Counted in steps of the contraction, which are segments: one wait for each.
        return Arrival(columns=visible.block, wait=wait)

    def _pull(self, refs: Refs) -> None:
        transfers.pull(
            _Fetch(self),
            (refs.k, refs.v),
            refs.gathered,
            # Publishes a piece to the polling warps of all blocks.
            arrived=lambda place: refs.received.at[place.key].signal(),
            buffers=refs.pulled,
            barriers=refs.pulled_full,
            num_blocks=refs.num_blocks,
        )


@dataclasses.dataclass(frozen=True)
class _Fetch:
    """The peers' keys and values: head by head, of each the peers' in the order of the steps."""

    call: _Attention

    @property
    def num_pieces(self) -> int:
        """Of all peers."""
        call = self.call
        return call.batch * call.chunks * call.kv_heads * call.peers * call.pieces_of_chunk

    @property
    def piece(self) -> tuple[int, int]:
        """Keys, and elements of each."""
        return self.call.config.pull_rows, self.call.dim

    def place(self, index: Int) -> copies.Place:
        """The piece at `index`, of keys and of values in turn; the key is that of `received`."""
        call = self.call
        of_chunk = div(index, call.pieces_of_chunk)
        within = index - of_chunk * call.pieces_of_chunk
        down = div(within, 2)
        of_peer = div(of_chunk, call.chunks)
        of_head = div(of_peer, call.peers)
        batch = div(of_head, call.kv_heads)
        peer, head = of_peer - of_head * call.peers, of_head - batch * call.kv_heads
        chunk = batch * call.chunks + of_chunk - of_peer * call.chunks
        return copies.Place(
            2 * peer + within - 2 * down,
            chunk * call.visible.keys + down * call.config.pull_rows,
            head * call.dim,
            (peer, chunk, head),
        )

    def sources(self, ref: tuple[Ref, Ref]) -> list[Ref]:
        """Keys and values of each peer in turn."""
        if self.call.team is None:
            return []
        pairs = zip(*(transfers.on_peers(x, self.call.team) for x in ref), strict=True)
        return [x for pair in pairs for x in pair]

    def destination(self, gathered: Ref, source: Int) -> Ref:
        """Where they are kept."""
        return gathered.at[source]
