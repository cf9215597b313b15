"""`out = epilogue(all_gather(lhs) @ rhs)`, lhs gathered along its columns, the contraction.

Kernel and protocol are those of `all_gather_matmul`: the peers' shards are pulled, and the only signal
between devices says, at the end, that a peer's operand is no longer needed. But each tile of the result
needs all devices' columns of lhs. A tile begins with the device's own columns, times the matching
rows of rhs, and continues with those of its successors on the ring. A spare warp of every block
fetches the peers' columns meanwhile, one band of rows after another, in the order of the tiles
(`gathering_by_columns`).

| object | written or signalled by | waited for by | count | proves |
|---|---|---|---|---|
| `gathered[:, i]` | the pulling warps | | | columns of the `i + 1`-th successor |
| `received[i, m]` | each pulling warp, per piece | the polling warps, tiles of row `m` | pieces in the rows | a tile's rows of those columns are in place |
| `released` | the peers' pulling warps, once each | block 0's pulling warp | blocks x peers | no peer reads this device's lhs any more |

Block 0's pulling warp zeroes `received` at the end, as in `all_gather_matmul`.
"""  # noqa: E501

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from stretto.distributed import schedule
from stretto.distributed.team import Team
from stretto.kernels.engine import padding
from stretto.kernels.engine.architectures import TileConfig, tiles_for
from stretto.kernels.engine.waves import Result
from stretto.kernels.fused import beside, copied, gathering
from stretto.kernels.fused.gather_ways import Gather, kept_columns
from stretto.kernels.fused.gathering_by_columns import by_columns
from stretto.kernels.fused.obstacles import obstacle
from stretto.kernels.fused.pull_config import PullConfig
from stretto.kernels.operation import Call, Kernel
from stretto.kernels.problem.epilogue import with_arrays
from stretto.kernels.problem.problem import Problem


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(PullConfig):
    """The configuration of the fused kernel; `tiles.raster_width` tiles are a band of rows."""

    def check(self, problem: Problem) -> None:
        """Raises ValueError unless the kernel can be built so for `problem`."""
        super().check(problem)
        if self.tiles.tile_m % self.pull_rows:
            raise ValueError(
                f"pull_rows={self.pull_rows} must divide tile_m={self.tiles.tile_m}: rows are"
                " waited for by tiles."
            )

    @staticmethod
    def candidates(problem: Problem | None = None) -> Iterator[Config]:
        """The configurations that the tuner tries, for one problem or for all."""
        tiles = tiles_for(problem)
        for tile in (tiles.narrow, *tiles.large_ones):
            for raster_width in (4, 8, 16):
                yield Config(tiles=dataclasses.replace(tile, raster_width=raster_width))
        if problem is not None and problem.types.scales is None:
            yield default_config(problem)


def default_config(problem: Problem) -> Config:
    """The configuration for a problem that no table has: tiles that keep all blocks busy."""
    tiles = tiles_for(problem)
    rows = schedule.ceil_div(problem.sizes["m"], tiles.large.tile_m)
    columns = schedule.ceil_div(problem.sizes["n"], problem.devices)
    for tile in (_large(problem), tiles.narrow):
        if 2 * rows * columns >= problem.machine.multiprocessors * tile.tile_n:
            return Config(tiles=tile)
    return Config(tiles=tiles.narrowest)


def _large(problem: Problem) -> TileConfig:
    """Large tiles, or a pair's where rows of rhs begin within a line and that is faster."""
    tiles, m = tiles_for(problem), problem.sizes["m"]
    columns, own = schedule.ceil_div(problem.sizes["n"], problem.devices), 1 / problem.devices
    result = Result.of(problem, columns, problem.sizes["k"], own=own)
    result = dataclasses.replace(result, shards=1, rows=m)
    sharing = tiles.sharing if result.rhs_within else ()
    return min((tiles.large_for(m), *sharing), key=result.time)


def run(operands: Any, call: Call) -> tuple[tuple[jax.Array, ...], jax.Array | None]:
    """`[m, k_shard]` times each of `[D * k_shard, n_i]` -> `[m, n_i]`, as the public operation.

    And the gathered lhs `[m, D * k_shard]` with `call.options.return_gathered`.
    """
    lhs, rhs, arrays = with_arrays(operands)
    options = call.options
    team = Team.along(call.axes)
    m, k_shard = lhs.shape

    widths = gathering.widths_of(rhs, options.rhs_transposed)
    padded = call.config.padded(lhs, columns=sum(widths))
    often = gathering.is_used_often(m, options.rhs_transposed)
    sides = [_in_parts(x, team.size, often, call) for x in rhs]
    gather = _gather(padded, sides, team, call)
    cut_to = gathering.results_widths(rhs, options)
    results = gathering.launch(
        gather, padded, sides, arrays, team, call, wanted=cut_to, name="all_gather_matmul_k"
    )
    outs = tuple(padding.cut(out, m, n) for out, n in zip(results, cut_to, strict=False))
    if not options.return_gathered:
        return outs, None
    return outs, results[-1][:m, :, :k_shard].reshape(m, team.size * k_shard)


def _in_parts(rhs: jax.Array, parts: int, often: bool, call: Call) -> jax.Array:
    """rhs with the devices' parts of the contraction as a dimension, as `by_columns` takes it.

    The padding of lhs's columns is zero, and is multiplied by zeros beyond the end of a part.
    """
    tiles = call.config.tiles
    if not call.options.rhs_transposed:
        rhs = rhs.reshape(parts, -1, rhs.shape[1])
        return padding.pad(rhs, tiles, padding.COLUMNS, copied=often)
    matrix = len(rhs), rhs.shape[1] // parts
    rows, k_shard = padding.shape_of(matrix, rhs.dtype, tiles, padding.COLUMNS, copied=often)
    rhs = padding.pad_parts(rhs, 1, parts, k_shard)
    return padding.pad_rows(rhs, rows).reshape(rows, parts, k_shard)


KERNEL = Kernel(
    Config=Config,
    run=run,
    obstacle=obstacle,
    default=default_config,
    candidates=Config.candidates,
    copies=copied.by_contraction,
    beside=beside.obstacle,
)


def _gather(lhs: jax.Array, rhs: Sequence[jax.Array], team: Team, call: Call) -> Gather:
    """What is pulled, piece by piece, of padded lhs `[m, k_shard]`, and which tile needs what."""
    config: Config = call.config
    m, k_shard = lhs.shape
    shape, by_shard = config.tiles, call.options.return_gathered
    n = gathering.tiled_columns(rhs, call.options, shape)
    side_by_side = team.size if by_shard else team.size - 1  # Shards in a gathered row.
    columns = kept_columns(lhs, by_shard)
    plan = schedule.BandedPullPlan(
        sources=team.size - 1,
        rows=m,
        columns=k_shard,
        piece_rows=config.pull_rows,
        piece_columns=config.piece_columns(k_shard, side_by_side * columns),
        chunk_rows=shape.tile_m,
        band_rows=shape.raster_width * shape.tile_m,
    )
    turned = call.options.rhs_transposed
    return by_columns(
        team, plan, n, shape, columns=columns, by_shard=by_shard, rhs_transposed=turned
    )
