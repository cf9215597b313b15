"""The derivative of attention to the keys of one device, from the logsumexp of all keys.

A block of the grid has 128 keys and values, and goes through the tiles of queries that see them, of
all heads that share them, or of a part of these: the derivatives of keys and values are added up in registers. Those of
queries are added up in memory, in float32, by the blocks as they come: the sums' last bits differ
from run to run. With `ordered` the blocks take turns, in the order of their keys; the first one
stores its part.

The keys may be a peer's. The derivatives of keys and values are then stored in the peer's memory, and
this device gets those of its own keys from another one.

| object | written or signalled by | waited for by | count | proves |
|---|---|---|---|---|
| `handed_over`, of a peer's keys | the loading warps of the device at `-distance`, once each | block 0's transfer warp | blocks of the grid | all derivatives of the own keys are in place |
| `cleared` | the adding warps, once each | the same | blocks of the grid | all derivatives of queries are zero |
| `added[r, h, t]`, with `ordered` | the adding warps, once a block of keys that the tile sees | the same | blocks of keys before this one | these have added what they give to tile `t` |

With `ordered` a block of keys waits only for blocks with smaller numbers, of which every block of
the grid takes its own in order: the smallest one that is not complete waits for none.
"""  # noqa: E501

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed.schedule import Int, div
from stretto.distributed.semaphores import SemaphoreArray
from stretto.distributed.team import Team
from stretto.kernels.engine.attention import derivative_documents, derivative_shares, documents
from stretto.kernels.engine.attention.derivative_documents import SeeingDocuments
from stretto.kernels.engine.attention.derivative_parts import DerivativeParts
from stretto.kernels.engine.attention.order import EvenOrder, SortedOrder
from stretto.kernels.engine.fuse import Refs, fuse
from stretto.kernels.engine.hopper.attention.derivative_config import DEFAULT, DerivativeTiles
from stretto.kernels.engine.hopper.attention.derivative_mainloop import Derivative
from stretto.kernels.engine.parts import Product, Sink, Stream, Transfer
from stretto.kernels.fused.attention_config import Sequence
from stretto.kernels.fused.attention_derivative_moves import Moves, Sizes, obstacle


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
    config: DerivativeTiles = DEFAULT,
    device: Int = 0,
    devices: int = 1,
    distance: int = 0,
    team: Team | None = None,
    segments: tuple[jax.Array, jax.Array] | None = None,
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
      team: all of these, in the order of the sequence, in place of `device` and `devices`. The
        derivatives of keys and values go to the device that has the keys.
      segments: of documents packed into the sequence: int32 `[batch, tokens]` of q, and `[batch,
        kv_tokens]` of these keys. A query sees the keys of its own document.
      interpret: as `fuse` takes it.

    Returns:
      (float32 of q's shape, k's shape and type, v's). With a team the latter two are of this
      device's own keys, by the queries of the device at `-distance`; else of the keys given.

    Raises:
      ValueError: a number of parts that does not divide the heads that share a head of keys, or
        documents with `ordered`.
      NotImplementedError: operands that the kernel does not take, or another scale.
    """
    found = obstacle(q, k.shape[1], sequence.chunks)
    if found is None and not 0 < scale < math.inf:
        found = f"scale={scale} must be above 0."
    if found is not None:
        raise NotImplementedError(f"the derivative of attention: {found}")
    config.check()
    group = q.shape[2] // k.shape[2]
    if config.parts is not None and group % config.parts:
        raise ValueError(f"parts={config.parts} must divide the {group} heads of a head of keys.")
    if segments is not None and config.ordered:
        raise ValueError("ordered=True takes no documents, whose blocks come in another order.")
    if team is not None:
        device, devices = team.device_id(), team.size
    sizes = Sizes.of(q, k, sequence, config, devices, distance)
    own_device = jnp.asarray(device, jnp.int32)
    # What accumulators begin with: of a row without keys all weights are 0.
    first_scores = jnp.where(lse == -jnp.inf, -jnp.inf, -lse / scale)
    of_device = {} if devices == 1 else dict(device=own_device[None])
    if segments is None:
        order_of_blocks = dict(shares=_shares(sizes)[own_device])
    else:
        order_of_blocks = _documents(segments, sizes, own_device)
    made = _launch(
        dict(
            q=_in_chunks(q, sizes),
            k=_in_chunks(k, sizes),
            v=_in_chunks(v, sizes),
            bar=_in_chunks(out_bar, sizes),
            lse=_rows_in_chunks(first_scores, sizes),
            delta=_rows_in_chunks(-delta, sizes),
            **order_of_blocks,
            **of_device,
        ),
        sizes,
        config,
        scale,
        team if distance else None,
        interpret,
    )
    q_bar = made["q_bar"].reshape(q.shape) * scale
    if sequence.causal and config.ordered:
        q_bar = jnp.where(_seen(sizes, own_device), q_bar, 0)
    return q_bar, _of_all_parts(made["k_bar"], k), _of_all_parts(made["v_bar"], v)


def _of_all_parts(bars: jax.Array, like: jax.Array) -> jax.Array:
    """The sum over the first dimension, of the shape and type of `like`."""
    bar = bars[0] if len(bars) == 1 else bars.astype(jnp.float32).sum(0).astype(bars.dtype)
    return bar.reshape(like.shape)


def _launch(
    operands: dict[str, jax.Array],
    sizes: Sizes,
    config: DerivativeTiles,
    scale: float,
    team: Team | None,
    interpret: Any,
) -> dict[str, jax.Array]:
    q, k, v = (operands[name] for name in "qkv")
    visible = sizes.seeing.visible
    tiles_of_queries = sizes.rows, sizes.heads, visible.queries // visible.rows
    semaphores = (
        dict(added=SemaphoreArray(tiles_of_queries, local=True))
        if config.ordered
        else dict(cleared=SemaphoreArray(local=True))
    )
    if team is not None:
        semaphores["handed_over"] = SemaphoreArray()
    return fuse(
        lambda refs: _parts(
            refs, sizes, scale, team, ordered=config.ordered, is_packed="places" in operands
        ),
        name="attention_derivative",
        team=team,
        mainloop=Derivative(config, Product(lhs=k.dtype, rhs=v.dtype, out=q.dtype), sizes.dim),
        num_tiles=sizes.order().num_tiles,
        operands=operands,
        outs=dict(
            q_bar=jax.ShapeDtypeStruct(q.shape, jnp.float32),
            k_bar=jax.ShapeDtypeStruct((sizes.parts, *k.shape), k.dtype),
            v_bar=jax.ShapeDtypeStruct((sizes.parts, *v.shape), v.dtype),
        ),
        semaphores=semaphores,
        signals=team is not None,
        # Powers of two by the hardware's own instruction: weights are rounded to 16 bits anyway.
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )


def _shares(sizes: Sizes) -> jax.Array:
    """The table of all devices' shares."""
    return jnp.asarray(derivative_shares.table(sizes.seeing, sizes.order()))


def _documents(
    segments: tuple[jax.Array, jax.Array], sizes: Sizes, device: jax.Array
) -> dict[str, jax.Array]:
    """The operands of documents, by name: those of tokens, and what blocks of keys see of them."""
    of_queries, of_keys = (x.reshape(sizes.rows, -1) for x in segments)
    table = derivative_documents.table(of_queries, of_keys, sizes.seeing.of_device(device))
    places = documents.most_work_first(table)
    return dict(of_queries=of_queries, of_keys=of_keys, ranges=table, places=places)


def _in_chunks(x: jax.Array, sizes: Sizes) -> jax.Array:
    """`[batch, tokens, heads, dim]` as `[batch * chunks, tokens of a chunk, heads * dim]`."""
    return x.reshape(sizes.rows, -1, x.shape[2] * x.shape[3])


def _rows_in_chunks(x: jax.Array, sizes: Sizes) -> jax.Array:
    """`[batch, heads, tokens]` as `[batch * chunks, heads, tokens of a chunk]`."""
    of_chunks = x.reshape(sizes.batch, sizes.heads, sizes.chunks, -1)
    return of_chunks.transpose(0, 2, 1, 3).reshape(sizes.rows, sizes.heads, -1)


def _seen(sizes: Sizes, device: jax.Array) -> jax.Array:
    """Which queries see any key, bool `[1, tokens, 1, 1]`; nothing is stored for the others."""
    seeing = sizes.seeing.of_device(device)
    visible = seeing.visible
    tiles = jnp.arange(visible.queries // visible.rows, dtype=jnp.int32)
    of_chunks = [seeing.is_seen(visible.first_query(c, tiles)) for c in range(visible.chunks)]
    seen = jnp.repeat(jnp.concatenate(of_chunks), visible.rows)
    return seen[None, :, None, None]


def _parts(
    refs: Refs,
    sizes: Sizes,
    scale: float,
    team: Team | None,
    *,
    ordered: bool,
    is_packed: bool,
) -> DerivativeParts:
    seeing = sizes.seeing
    if seeing.visible.devices > 1:
        seeing = seeing.of_device(refs.device[0])
    packed = None
    if is_packed:
        packed = SeeingDocuments(
            seeing=seeing, table=refs.ranges, queries=refs.of_queries, keys=refs.of_keys
        )
    moves = Moves(sizes=sizes, seeing=seeing, refs=refs, ordered=ordered, team=team)
    unused = Stream(load=_nothing)
    return DerivativeParts(
        **_order(refs, sizes, is_packed=is_packed),
        k_tiles=1,
        lhs=unused,
        rhs=unused,
        sink=Sink(store=_nothing, stored=None if team is None else _nothing),
        transfer=None if team is None else Transfer(run=_nothing, finish=moves.finish),
        load_keys=moves.load_keys,
        load_queries=moves.load_queries,
        store_keys=moves.store_keys,
        stored_keys=None if team is None else functools.partial(moves.stored_keys, team),
        clear=None if ordered else moves.clear,
        wait_for_turn=moves.wait_for_turn,
        add_queries=moves.add_queries,
        added=moves.added,
        seeing=seeing,
        group=sizes.group,
        exponent=scale * math.log2(math.e),
        scale=scale,
        documents=packed,
    )


def _order(refs: Refs, sizes: Sizes, *, is_packed: bool) -> dict[str, Any]:
    """The fields of the kernel's parts that say which blocks of keys a block of the grid takes."""
    tiles = sizes.order()
    if is_packed:
        order = SortedOrder(
            tiles=tiles,
            of_step=tiles.blocks,
            heads=tiles.kv_heads,
            place=lambda at: refs.places[at],
        )
        return dict(order=order, ahead=True)

    def entry(index: Int) -> Int:
        row = div(index, tiles.num_blocks)
        return refs.shares[row + 1, index - row * tiles.num_blocks]

    return dict(
        order=EvenOrder(tiles=tiles, entry=entry), own_tiles=lambda block: refs.shares[0, block]
    )


def _nothing(*_: Any) -> None:
    """What stands for a part that this kernel has no use for."""
