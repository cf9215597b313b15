"""`out = epilogue(all_gather(lhs) @ rhs)`, lhs gathered along its columns, the contraction.

The kernel is that of `all_gather_matmul`, and so is its protocol: the peers' shards are pulled, and
the only word between devices is, at the end, that a peer's operand is no longer needed. But each
tile of the result needs all devices' columns of lhs. It begins with the device's own, times the
rows of rhs that belong to them, and goes on with its successors' on the ring. A spare warp of every
block fetches these meanwhile, a band of rows after the other, in the order in which the tiles want
them (`gathering_columns`).

| object | written or signalled by | waited for by | count | proves |
|---|---|---|---|---|
| `gathered[:, i]` | the pulling warps | | | columns of the `i + 1`-th successor |
| `received[i, m]` | each pulling warp, per piece | the looking-out warps, tiles of row `m` | pieces in the rows | a tile's rows of those columns are in place |
| `released` | the peers' pulling warps, once each | block 0's pulling warp | blocks x peers | no peer reads this device's lhs any more |
"""  # noqa: E501

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from stretto.distributed import schedule
from stretto.distributed.team import Team
from stretto.kernels import all_gather_matmul, costs, tile_config
from stretto.kernels.dispatch import Problem, Verdict
from stretto.kernels.gathering_columns import Columns
from stretto.kernels.pull_config import PullConfig
from stretto.kernels.reference import Epilogue
from stretto.kernels.segments import Segments


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(PullConfig):
    """How the fused kernel is cut up; `tiles.raster_width` tiles are a band of rows."""

    def check(self, itemsize: int) -> None:
        """Raises ValueError unless the kernel can be built so, for operands of `itemsize` bytes."""
        super().check(itemsize)
        if self.tiles.tile_m % self.pull_rows:
            raise ValueError(
                f"pull_rows={self.pull_rows} must divide tile_m={self.tiles.tile_m}: rows are"
                " waited for by tiles."
            )

    @staticmethod
    def candidates(problem: Problem | None = None) -> Iterator[Config]:
        """What the tuner tries, for one problem or for all."""
        del problem
        for tile in (tile_config.NARROW, tile_config.LARGE):
            for raster_width in (4, 8, 16):
                yield Config(tiles=dataclasses.replace(tile, raster_width=raster_width))


def unsupported(problem: Problem, config: Config | None) -> str | None:
    """Why the kernel cannot serve `problem`, or None if it can; ValueError for a bad `config`."""
    obstacle = tile_config.unsupported(problem)
    if obstacle is None and config is not None:
        config.check(2)
    return obstacle


def default_config(problem: Problem) -> Config:
    """The configuration for a problem that no table has: tiles that keep all blocks busy."""
    rows = schedule.ceil_div(problem.m, tile_config.LARGE.tile_m)
    columns = schedule.ceil_div(problem.n, problem.devices)
    for tile in (tile_config.LARGE, tile_config.NARROW):
        if 2 * rows * columns >= costs.BLOCKS * tile.tile_n:
            return Config(tiles=tile)
    return Config(tiles=tile_config.NARROWEST)


def estimate(problem: Problem) -> tuple[float, float]:
    """Times in microseconds, (fused, XLA), from sizes and rates alone."""
    return costs.all_gather_matmul(problem)


def judge(problem: Problem) -> Verdict:
    """Which implementation should be faster, by `estimate`."""
    return costs.judge(estimate(problem))


def launch(
    lhs: jax.Array,
    rhs: Sequence[jax.Array],
    team: Team,
    *,
    epilogue: Epilogue | None,
    out_dtype: jnp.dtype,
    config: Config,
    rhs_transposed: bool = False,
    return_gathered: bool = False,
    interpret: Any = None,
) -> list[jax.Array]:
    """Runs the kernel on lhs `[m, k_shard]` and each of rhs, `[size * k_shard, n_i]`.

    Or `[n_i, size * k_shard]` transposed. All must be padded (`padding`), k_shard too. Returns the
    products `[m, n_i]`, and after them, if asked for, the gathered lhs `[m, size, k_shard]`.
    """
    m, k_shard = lhs.shape
    tiles = config.tiles
    parts = Segments.of([x.shape[0 if rhs_transposed else 1] for x in rhs], tiles.tile_n)
    side_by_side = team.size if return_gathered else team.size - 1  # Shards in a gathered row.
    plan = schedule.BandedPullPlan(
        sources=team.size - 1,
        rows=m,
        columns=k_shard,
        piece_rows=config.pull_rows,
        piece_columns=config.piece_columns(k_shard, side_by_side * k_shard),
        chunk_rows=tiles.tile_m,
        band_rows=tiles.raster_width * tiles.tile_m,
    )
    return all_gather_matmul.launch_with(
        Columns(team, plan, parts.total * tiles.tile_n, tiles, by_shard=return_gathered),
        lhs,
        rhs,
        parts,
        name="all_gather_matmul_k",
        pull_slots=config.pull_slots,
        epilogue=epilogue,
        out_dtype=out_dtype,
        rhs_transposed=rhs_transposed,
        return_gathered=return_gathered,
        interpret=interpret,
    )
