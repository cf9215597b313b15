"""`out = reduce_scatter(lhs @ rhs)`, the scatter under the matmul; and `all_reduce` on top of it.

Each device computes the tiles of its peers' rows, and keeps these products in its own memory. A
spare warp of every block pulls the peers' products for this device's rows as they are finished.
The own rows are last, or each own tile follows the same tile for the peers by some waves
(`orders.OwnersOrder`). To its own products the device adds the pulled products in float32
(`parts.Addends`), of a reduce-scatter also a residual that its epilogue adds, and stores the sum: in
its own memory, or for an all-reduce on every device.
(`reducing` has these parts.)

A reduce-scatter in 8 bits on two devices has no `fetched`: the peer's products are pulled into the
result, and as own ones are stored the copy engine adds them there (`reducing.InPlace`).

| object | written or signalled by | waited for by | count | proves |
|---|---|---|---|---|
| `partial[s]` | the storing warps | | | the product for the `s + 1`-th successor |
| `produced[s, tile]` | storing warps of the device at `-(s + 1)` | pulling warps | blocks of a tile | its `partial[s]` holds the tile |
| `fetched[s]` | the pulling warps | | | the product of the device at `-(s + 1)` |
| `arrived[block, tile]` | the pulling warps | the storing warp of that block of the tile | peers | the tile is in all of `fetched` |
| `released` | the peers' pulling warps, once each | block 0's pulling warp | blocks x peers | no peer reads `partial` any more |
| `finished` | owners' storing warps, per tile | block 0's pulling warp | peers x tiles x blocks of a tile | all of `out` is in place (all-reduce) |

Tiles for peers are computed before the peers have started. Pulling and storing warps wait for the peers
(`handshake`) before they signal. A store is complete, not only read, before its signal. All devices
compute tiles wave by wave in the same order, and a tile waits only for tiles of the same wave or an
earlier one. The blocks of a wave run at the same time and only own tiles wait, so that devices
never wait for each other in a circle.

The kernel leaves all semaphores at zero (`SemaphoreArray.restored`). For each of them one warp waits,
which subtracts what it has waited for, and what is signalled is waited for in full: `produced[s, tile]` by the warp
that pulls the tile, `arrived[block, tile]` by one storing warp, `released` and `finished` by block 0's
pulling warp. So they are zero when the last block has ended. A peer signals the next launch's `produced`,
`finished` and `released` only after that launch has started on this device, and so after that.
"""  # noqa: E501

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from stretto.distributed import schedule
from stretto.distributed.semaphores import SemaphoreArray
from stretto.distributed.team import Team
from stretto.kernels.engine import padding, streams, tiles, transfers
from stretto.kernels.engine.architectures import mainloop_of
from stretto.kernels.engine.beside import in_memory
from stretto.kernels.engine.fuse import Refs, fuse
from stretto.kernels.engine.mainloop import Factory
from stretto.kernels.engine.orders import OwnersOrder, ShardOrder
from stretto.kernels.engine.parts import Parts, Product, Scales, Sink, Transfer
from stretto.kernels.engine.remainder import sharing_of
from stretto.kernels.engine.scales import Scaling, load_arranged_rows, load_rows, times_factors
from stretto.kernels.engine.segments import Segments
from stretto.kernels.engine.shared_memory import row_elements
from stretto.kernels.engine.tiles import TileShape
from stretto.kernels.engine.transfers import Buffers
from stretto.kernels.fused import beside, copied, obstacles, row_blocks, unfused
from stretto.kernels.fused.add_config import PIECE_ROWS, AddConfig, default_tiles, fitted
from stretto.kernels.fused.obstacles import obstacle
from stretto.kernels.fused.reducing import InPlace, Products, adds_in_place, lhs_window, owner_of
from stretto.kernels.operation import Call, Kernel
from stretto.kernels.problem.epilogue import with_arrays
from stretto.kernels.problem.problem import Problem


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(AddConfig):
    """Configuration of the fused kernel; by default all own tiles are last."""


def default_config(problem: Problem) -> Config:
    """The configuration for a problem that no table has."""
    return Config(tiles=default_tiles(problem, scattered=True))


def run(operands: Any, call: Call) -> jax.Array:
    """The sum of `[m, k_i] @ [k_i, n]`, scattered -> `[m / D, n]`, as the public operation.

    `operands` are (lhs, rhs), each of several, or (lhs, rhs, arrays) with a residual `[m / D, n]`.
    If m is no multiple of D, the last devices have rows of padding: `[ceil(m / D), n]`.
    """
    lhs, rhs, arrays = with_arrays(operands)
    blocks, devices = call.options.blocks, Team.along(call.axes).size
    if blocks > 1 and (
        call.config.unfused
        or not row_blocks.are_whole(len(lhs[0]) // devices, blocks, call.config.tiles.tile_m)
    ):
        dealt = tuple(row_blocks.dealt(x, blocks, devices) for x in lhs)
        return run((dealt, rhs, arrays), call.with_options(blocks=1))
    if call.config.unfused:
        return unfused.matmul_reduce_scatter(operands, call)
    return sharded(operands, call)[0]


def sharded(
    operands: tuple[Sequence[jax.Array], Sequence[jax.Array]],
    call: Call,
    *,
    everywhere: bool = False,
) -> jax.Array:
    """The sum of `[m, k_i] @ [k_i, n]`, this device's part, as `[shards, m_shard, n]`.

    The rows are divided into equal shards, the last ones padded if D does not divide m.
    """
    lhs, rhs, arrays = with_arrays(operands)
    team, tiles = Team.along(call.axes), call.config.tiles
    m, n = lhs[0].shape[0], rhs[0].shape[0 if call.options.rhs_transposed else 1]
    often = m >= padding.REUSE["lhs" if call.options.rhs_transposed else "rhs"]
    blocks = call.options.blocks
    if blocks > 1:
        shards = [x.reshape(blocks, team.size, -1, x.shape[1]) for x in lhs]
    else:
        shards = _in_shards(lhs, team.size, tiles, copied=n >= padding.REUSE["lhs"])
    sides = [padding.pad(x, tiles, padding.COLUMNS, copied=often) for x in rhs]
    (residual,) = arrays or (None,)
    return _on_padded(shards, sides, (m, n), call, everywhere=everywhere, residual=residual)


def scaled(operands: Any, call: Call, *, everywhere: bool = False) -> jax.Array:
    """`sharded` of one pair in 8 bits, rhs transposed: (lhs, rhs, their scales), each in a tuple.

    The scales are as `problem.scales.checked` returns them, lhs's in as many rows as lhs has.
    """
    lhs, rhs, (lhs_scale,), rhs_scale = operands
    size, sizes = Team.along(call.axes).size, (lhs[0].shape[0], rhs[0].shape[0])
    padded = padding.pad_to_tiles(padding.in_shards(lhs[0], size), padding.ROWS)
    side = padding.pad_to_tiles(rhs[0], padding.COLUMNS)
    run = functools.partial(_on_padded, [padded], [side], sizes, call, everywhere=everywhere)
    if call.options.of_tensors and adds_in_place(lhs, size, call.config, everywhere):
        return run(factors=[lhs_scale[0], rhs_scale[0][0]])
    scaling = Scaling.of(
        call.options.scales,
        padding.in_shards(lhs_scale, size),
        rhs_scale,
        k=padded.shape[2],
        rows=padded.shape[1],
        columns=[side.shape[0]],
        shape=call.config.tiles,
    )
    return run(scaling=scaling)


def _on_padded(
    lhs: Sequence[jax.Array],
    rhs: Sequence[jax.Array],
    sizes: tuple[int, int],
    call: Call,
    *,
    everywhere: bool,
    scaling: Scaling | None = None,
    factors: Sequence[jax.Array] = (),
    residual: jax.Array | None = None,
) -> jax.Array:
    """`launch`, cut to the rows of a shard and the columns of a result of `sizes`, m and n."""
    team, (m, n) = Team.along(call.axes), sizes
    out = launch(
        lhs,
        rhs,
        team,
        # In 8 bits the result has whole tiles.
        wanted=n if call.options.scales is None else rhs[0].shape[0],
        out_dtype=call.options.out_dtype,
        config=call.config,
        rhs_transposed=call.options.rhs_transposed,
        everywhere=everywhere,
        scaling=scaling,
        factors=factors,
        residual=residual,
        interpret=call.interpret,
    )
    return padding.cut(out, schedule.ceil_div(m, team.size), n)


def _in_shards(
    lhs: Sequence[jax.Array], size: int, tiles: TileShape, *, copied: bool
) -> list[jax.Array]:
    """Each of lhs padded, `[size, m_shard, k_i]`; or `[m, k_i]`, where shards are not full."""
    padded = [padding.pad(x, tiles, copied=copied) if tiles.takes_edges else x for x in lhs]
    if tiles.takes_edges and len(lhs[0]) % size:
        return padded
    return [padding.pad(padding.in_shards(x, size), tiles) for x in padded]


KERNEL = Kernel(
    Config=Config,
    run=run,
    obstacle=obstacle,
    beside=beside.left_of_a_sum,
    default=default_config,
    fitted=lambda config, problem: fitted(config, problem, default_config(problem)),
    candidates=Config.candidates,
    copies=copied.scattered,
    apart=unfused.by_scatter(Config(unfused=True)),
)

SCALED = dataclasses.replace(
    KERNEL,
    run=lambda operands, call: scaled(operands, call)[0],
    obstacle=obstacles.scaled,
    beside=None,
    untried=True,
    apart=None,
)
"""The kernel for operands in 8 bits: scales are the device's own, and are not sent."""


def launch(
    lhs: Sequence[jax.Array],
    rhs: Sequence[jax.Array],
    team: Team,
    *,
    wanted: int,
    out_dtype: jnp.dtype,
    config: AddConfig,
    rhs_transposed: bool = False,
    everywhere: bool = False,
    scaling: Scaling | None = None,
    factors: Sequence[jax.Array] = (),
    residual: jax.Array | None = None,
    mainloop: Factory = mainloop_of,
    interpret: Any = None,
) -> jax.Array:
    """Runs the kernel on pairs of lhs `[size, m_shard, k_i]` and rhs `[k_i, n]`, or `[n, k_i]`.

    All must be padded (`padding`). Where the last shards are not full, lhs is `[m, k_i]`; where a
    shard has blocks of whole tiles, `[blocks, size, rows, k_i]`. The pairs' products are added up.
    Returns `[1, m_shard, n]`, or with `everywhere` (all-reduce) `[size, m_shard, n]`, of the
    `wanted` columns or a few more. Of operands in 8 bits there is one pair, and `scaling`, lhs's
    `[size, k / 128 or 1, rows]`, or, of sums in place, two `factors` `[1]`. `residual` is added to
    the result, this device's `[m_shard, n]`.
    """
    given = rhs[0].shape[0 if rhs_transposed else 1]
    n = padding.made_columns(wanted, given, out_dtype, config.tiles)
    *blocks, rows, _ = lhs[0].shape
    m_shard = (
        math.prod(blocks) * rows // team.size if blocks else schedule.ceil_div(rows, team.size)
    )
    shape, peers = config.tiles, team.size - 1
    segments = Segments.of([x.shape[-1] for x in lhs], shape.tile_k)
    shard = ShardOrder(m_shard, n, shape, steps=team.size)
    out = jax.ShapeDtypeStruct((team.size if everywhere else 1, m_shard, n), out_dtype)
    in_place = adds_in_place(lhs, team.size, config, everywhere)
    kind = InPlace if in_place else Products

    def parts(refs: Refs) -> Parts:
        order = OwnersOrder(shard, team.size, refs.num_clusters, lag=config.own_lag)
        # Once for each peer: every `remote` creates a descriptor of the copy engine.
        outs = [refs.out, *(transfers.on_peers(refs.out, team) if everywhere else [])]
        products = kind(team, order, refs, everywhere, outs)
        return Parts(
            order=order,
            k_tiles=segments.total,
            lhs=streams.along_k(
                refs.lhs,
                segments,
                functools.partial(lhs_window, team, shape, lhs[0].shape[:-1], m_shard),
            ),
            rhs=streams.along_k(
                refs.rhs,
                segments,
                lambda tile, k: tiles.rhs_window(shape, k, tile.n, rhs_transposed),
            ),
            scales=None if scaling is None else _scales(refs, scaling, team, n, shape),
            fold=products.fold(*refs.residual),
            epilogue=times_factors(refs.factors) if factors else None,
            sink=Sink(store=products.store, stored=products.stored, before=products.before),
            transfer=Transfer(run=products.fetch, finish=products.finish),
        )

    kept = jax.ShapeDtypeStruct(
        (peers, shard.m_tiles * shape.tile_m, shard.n_tiles * shape.tile_n), out_dtype
    )
    results = fuse(
        parts,
        name="matmul_all_reduce" if everywhere else "matmul_reduce_scatter",
        team=team,
        mainloop=mainloop(shape, _product(shape, lhs, rhs, out, rhs_transposed, scaling, kind)),
        num_tiles=shard.num_tiles,
        # With a lag the tiles of a full wave are rotated (`OwnersOrder`).
        sharing=sharing_of(
            shape, segments.total, full_waves=config.full_waves and config.own_lag is None
        ),
        operands=dict(
            lhs=lhs,
            rhs=rhs,
            residual=[] if residual is None else [in_memory(residual, "elements", out, shape, 1)],
            factors=factors,
            **({} if scaling is None else scaling.operands()),
        ),
        outs=dict(out=out),
        symmetric=dict(partial=kept, **({} if in_place else dict(fetched=kept))),
        semaphores=dict(
            produced=SemaphoreArray((peers, shard.tiles_per_shard), restored=True),
            arrived=SemaphoreArray(
                (shape.blocks, shard.tiles_per_shard), local=True, restored=True
            ),
            **(dict(finished=SemaphoreArray(restored=True)) if everywhere else {}),
        ),
        buffers=Buffers(config.pull_slots, PIECE_ROWS, row_elements(out_dtype), out_dtype),
        signals=True,
        held_up=lambda clusters, shared: OwnersOrder(
            shard, team.size, clusters, lag=config.own_lag
        ).held_up(shared),
        invariant=everywhere,
        interpret=interpret,
    )
    return results["out"]


def _product(
    shape: TileShape,
    lhs: Sequence[jax.Array],
    rhs: Sequence[jax.Array],
    out: jax.ShapeDtypeStruct,
    rhs_transposed: bool,
    scaling: Scaling | None,
    kind: type[Products],
) -> Product:
    """The types of what is multiplied, and which edges tiles cross."""
    edges = padding.edges(shape, lhs=lhs, rhs=rhs, out=out)
    edges["lhs_edges"] |= lhs[0].ndim == 2  # Not in shards: a tile begins at any row.
    return Product(
        lhs=lhs[0].dtype,
        rhs=rhs[0].dtype,
        out=out.dtype,
        rhs_transposed=rhs_transposed,
        fold=kind.FOLD,
        scales=None if scaling is None else scaling.granularity,
        **edges,
    )


def _scales(refs: Refs, scaling: Scaling, team: Team, n: int, shape: TileShape) -> Scales:
    """The scales of the rows of the device whose result a tile belongs to, and of all columns."""
    load = load_arranged_rows if scaling.granularity == "mx" else load_rows
    return scaling.parts(
        load(lambda tile: refs.lhs_scales.at[owner_of(team, tile)], shape),
        refs.rhs_scales,
        Segments.of([n], shape.tile_n),
        shape,
    )
