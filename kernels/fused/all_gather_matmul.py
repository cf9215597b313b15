"""`out = epilogue(all_gather(lhs) @ rhs)`, for one rhs or several, the gather under the matmul.

Each device multiplies its own shard of lhs first, then those of its successors on the ring. One
spare warp of every block fetches the peers' shards at the same time, from the peers' operands
into a local buffer, in the order in which the matmul needs them; the matmul waits for a chunk
of columns at a time. Pulling keeps the data semaphores local: the only signal between devices is,
at the end, that a peer's operand is no longer needed. With `Config.gather_first` all rows are gathered first
and multiplied as one matrix (`gathering_rows_first`); `received` then has no first index.

| object | written or signalled by | waited for by | count | proves |
|---|---|---|---|---|
| `gathered`, shard `i` | the pulling warps | | | shard of the `i + 1`-th successor |
| `received[i, c]` | each pulling warp, per piece | the polling warps, step `i + 1` | pieces in chunk `c`, for `c` 0 of the scales too | columns `c` of that shard are in place; its scales |
| `released` | the peers' pulling warps, once each | block 0's pulling warp | blocks x peers | no peer reads this device's lhs any more |

Peers' operands are ready once the pulling warp has waited for the peers' start (`handshake`).

The kernel leaves `received` at zero: block 0's pulling warp zeroes it once no polling warp waits any more (`fuse`).
All signals came before, since for each element some tile waits until it is complete.
"""  # noqa: E501

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax

from stretto.distributed.schedule import PullPlan
from stretto.distributed.team import Team
from stretto.kernels.engine import padding
from stretto.kernels.engine.scales import Scaling
from stretto.kernels.fused import beside, copied, gathering, obstacles, row_blocks, unfused
from stretto.kernels.fused.gather_config import Config, default_config, fitted
from stretto.kernels.fused.gather_ways import Gather, kept_columns
from stretto.kernels.fused.gathering_by_shards import by_shards
from stretto.kernels.fused.gathering_rows_first import rows_first, rows_that_fill_tiles
from stretto.kernels.fused.obstacles import obstacle
from stretto.kernels.fused.pull_config import scale_piece
from stretto.kernels.operation import Call, Kernel
from stretto.kernels.problem.epilogue import with_arrays


def run(operands: Any, call: Call) -> tuple[tuple[jax.Array, ...], jax.Array | None]:
    """`[m_shard, k]` times each of `[k, n_i]` -> `[D * m_shard, n_i]`, as the public operation.

    And the gathered lhs `[D * m_shard, k]` with `call.options.return_gathered`. Blocks of rows
    (`call.options.blocks`) that the kernel cannot store in order are put in order by XLA.
    """
    blocks, devices = call.options.blocks, Team.along(call.axes).size
    if blocks > 1 and not _stores_blocks(operands[0], call):
        lhs, rhs, arrays = with_arrays(operands)
        dealt = jax.tree.map(lambda x: row_blocks.dealt(x, blocks, devices), arrays)
        outs, gathered = run((lhs, rhs, dealt), call.with_options(blocks=1))
        return tuple(row_blocks.joined(x, blocks, devices) for x in outs), gathered
    if call.config.unfused:
        return unfused.all_gather_matmul(operands, call)
    lhs, rhs, arrays = with_arrays(operands)
    options = call.options
    team = Team.along(call.axes)
    m_shard, k = lhs.shape
    tiles = call.config.tiles
    rows = call.config.gathered_rows(lhs.shape[0])
    widths = gathering.widths_of(rhs, options.rhs_transposed)
    padded = call.config.padded(padding.pad_rows(lhs, rows), columns=sum(widths))
    often = gathering.is_used_often(team.size * m_shard, options.rhs_transposed)
    sides = [padding.pad(x, tiles, padding.COLUMNS, copied=often) for x in rhs]
    gather = _gather(padded, sides, team, call)
    cut_to = gathering.results_widths(rhs, options)
    results = gathering.launch(
        gather, padded, sides, arrays, team, call, wanted=cut_to, name="all_gather_matmul"
    )
    columns = cut_to + [k] * options.return_gathered
    cut = [
        padding.cut(x.reshape(team.size, padded.shape[0], -1), m_shard, n).reshape(-1, n)
        for x, n in zip(results, columns, strict=True)
    ]
    return tuple(cut[: len(cut_to)]), cut[-1] if options.return_gathered else None


def _stores_blocks(lhs: jax.Array, call: Call) -> bool:
    """Whether the kernel stores the result block after block: each is made of whole tiles."""
    config: Config = call.config
    if config.unfused or config.gather_first:
        return False
    return row_blocks.are_whole(lhs.shape[0], call.options.blocks, config.tiles.tile_m)


KERNEL = Kernel(
    Config=Config,
    run=run,
    obstacle=obstacle,
    default=default_config,
    fitted=fitted,
    candidates=Config.candidates,
    copies=copied.by_rows,
    beside=beside.obstacle,
    apart=unfused.by_gather(Config(unfused=True)),
)


def scaled(operands: Any, call: Call) -> tuple[jax.Array, ...]:
    """`run` in 8 bits, each rhs transposed: of (lhs, rhs, lhs's scales, the scales of each rhs).

    The scales are as `problem.scales.checked` returns them; lhs's of "mx" are those of all devices'
    rows. Gathered operands are not returned.
    """
    lhs, rhs, lhs_scale, rhs_scale = operands
    team, shape, m_shard = Team.along(call.axes), call.config.tiles, lhs.shape[0]
    if call.options.scales == "mx":
        lhs_scale = lhs_scale.reshape(team.size, m_shard, -1)
    padded = padding.pad_to_tiles(lhs, padding.ROWS)
    sides = [padding.pad_to_tiles(x, padding.COLUMNS) for x in rhs]
    widths = [x.shape[0] for x in sides]
    granularity = call.options.scales
    scaling = Scaling.of(
        granularity,
        lhs_scale,
        rhs_scale,
        k=padded.shape[1],
        rows=padded.shape[0],
        columns=widths,
        shape=shape,
        multiple=scale_piece(granularity)[0],
    )
    gather = _gather(padded, sides, team, call, scaling)
    outs = gathering.launch(
        *(gather, padded, sides, (), team, call),
        wanted=widths,
        name="all_gather_matmul",
        scaling=scaling,
    )
    return tuple(
        out[:, :m_shard, : x.shape[0]].reshape(team.size * m_shard, x.shape[0])
        for out, x in zip(outs, rhs, strict=True)
    )


SCALED = dataclasses.replace(
    KERNEL, run=scaled, obstacle=obstacles.scaled, untried=True, apart=None
)
"""The kernel for operands in 8 bits: scales of lhs are gathered with its rows."""


def _gather(
    lhs: jax.Array,
    rhs: Sequence[jax.Array],
    team: Team,
    call: Call,
    scaling: Scaling | None = None,
) -> Gather:
    """What is pulled, piece by piece, of padded lhs `[m_shard, k]`, and which tile needs what."""
    config: Config = call.config
    m_shard, k = lhs.shape
    shape = config.tiles
    n = gathering.tiled_columns(rhs, call.options, shape)

    def plan(rows: int, piece_rows: int, stride: int) -> PullPlan:
        return PullPlan(
            rows=rows,
            columns=k,
            piece_rows=piece_rows,
            piece_columns=config.piece_columns(k, stride),
            chunk_columns=config.chunk_columns,
        )

    turned = call.options.rhs_transposed
    if config.gather_first:
        rows = rows_that_fill_tiles(team.size * m_shard, m_shard, shape.tile_m)
        pieces = plan(rows, config.piece_rows(m_shard), k)
        return rows_first(team, pieces, m_shard, n, shape, rhs_transposed=turned)
    by_shard = call.options.return_gathered
    columns = kept_columns(lhs, by_shard)
    pieces = plan(m_shard, config.pull_rows, columns)
    is_mx = scaling is not None and scaling.granularity == "mx"
    scales = None if scaling is None or is_mx else _plan_of_scales(scaling)
    return by_shards(
        team,
        pieces,
        n,
        shape,
        columns=columns,
        by_shard=by_shard,
        rhs_transposed=turned,
        blocks=call.options.blocks,
        scales=scales,
        has_mx=is_mx,
    )


def _plan_of_scales(scaling: Scaling) -> PullPlan:
    """The gather of a shard's scales, as one chunk."""
    along_k, rows = scaling.lhs.shape
    piece_rows, piece_columns = scale_piece(scaling.granularity)
    return PullPlan(
        rows=along_k,
        columns=rows,
        piece_rows=piece_rows,
        piece_columns=math.gcd(piece_columns, rows),
        chunk_columns=rows,
    )
