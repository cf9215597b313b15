"""How an all-gather matmul is cut up: its configuration, and which one is for which problem."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from stretto.distributed import schedule
from stretto.kernels.engine import padding
from stretto.kernels.engine.architectures import tiles_for
from stretto.kernels.fused import gather_times
from stretto.kernels.fused.obstacles import check_unfused
from stretto.kernels.fused.pull_config import PullConfig
from stretto.kernels.problem.problem import Problem

LEAST_ROWS = 4
"""Of a piece, where all rows are gathered first: with fewer, copying lhs takes less time."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(PullConfig):
    """The configuration of the fused kernel.

    Attributes:
      chunk_columns: columns of a shard that the matmul waits for at once.
      gather_first: gather all rows into one matrix and multiply that, for shards smaller than a
        tile; otherwise shard after shard, during the gather (`gathering`).
      unfused: gather with a kernel that only gathers, and multiply by XLA's matmul; all other
        fields are then ignored.
    """

    chunk_columns: int = 1024
    gather_first: bool = False
    unfused: bool = False

    def check(self, problem: Problem) -> None:
        """Raises ValueError unless the kernel can be built so for `problem`."""
        super().check(problem)
        if self.chunk_columns % self.pull_columns or self.chunk_columns % self.tiles.tile_k:
            raise ValueError(
                f"chunk_columns={self.chunk_columns} must be a multiple of"
                f" pull_columns={self.pull_columns} and of tile_k={self.tiles.tile_k}."
            )
        check_unfused(self.unfused, problem)
        if self.gather_first and problem.types.scales is not None:
            raise ValueError(
                "gather_first=True is not built for operands with scales; leave it out."
            )

    def piece_rows(self, m_shard: int) -> int:
        """Rows of a piece, where all rows are gathered first: no piece has rows of two shards."""
        return [r for r in range(1, self.pull_rows + 1) if m_shard % r == 0][-1]

    def gathered_rows(self, m_shard: int) -> int:
        """Rows of a gathered shard: padded to whole pieces."""
        if self.gather_first and self.piece_rows(m_shard) < LEAST_ROWS:
            return padding.padded(m_shard, padding.ROWS)
        return m_shard

    @staticmethod
    def candidates(problem: Problem | None = None) -> Iterator[Config]:
        """The configurations that the tuner tries, for one problem or for all."""
        tiles = tiles_for(problem)
        in_shards = problem is None or not _is_small(problem) or problem.types.scales is not None
        if problem is None or (_is_small(problem) and problem.types.scales is None):
            yield Config(unfused=True)
            for tile in (tiles.narrow, tiles.narrowest):
                yield Config(tiles=tile, chunk_columns=2048, gather_first=True)
        if in_shards:
            others = tiles.gathering if problem is None else gather_times.gathering(problem)
            for tile in dict.fromkeys((tiles.narrow, *tiles.large_ones, *others)):
                for chunk_columns in gather_times.chunks(problem):
                    yield Config(tiles=tile, chunk_columns=chunk_columns)
                if problem is not None and problem.types.scales is not None:
                    yield Config(tiles=tile, chunk_columns=2048, pull_slots=3)


def _is_small(problem: Problem) -> bool:
    """Whether a shard does not fill a tile."""
    return schedule.ceil_div(problem.sizes["m"], problem.devices) < tiles_for(problem).large.tile_m


def default_config(problem: Problem) -> Config:
    """The configuration for a problem that no table has."""
    m, n = problem.sizes["m"], problem.sizes["n"]
    tiles, chunk_columns = tiles_for(problem), gather_times.chunk_columns(problem)
    if not _is_small(problem) or problem.types.scales is not None:
        slots = Config.pull_slots + (problem.types.scales is not None)  # Pieces half as large.
        tile = gather_times.tiles_in_shards(problem)
        return Config(tiles=tile, chunk_columns=chunk_columns, pull_slots=slots)
    # The narrowest tiles of which every multiprocessor has one at most.
    rows = schedule.ceil_div(m, tiles.large.tile_m)
    columns = schedule.ceil_div(n, problem.devices)
    count = rows * schedule.ceil_div(columns, tiles.narrowest.tile_n)
    fits = count <= problem.machine.multiprocessors
    tile = tiles.narrowest if fits else tiles.narrow
    return Config(tiles=tile, chunk_columns=chunk_columns, gather_first=True)


def fitted(config: Config, problem: Problem) -> Config:
    """What was fastest at other sizes, but with the tiles of these where they are faster here.

    And with no more waits than by default, but in 8 bits, where these were not timed.
    """
    in_parts = config.unfused or config.gather_first
    if in_parts or _is_small(problem) or not gather_times.are_known(problem):
        return config
    best = default_config(problem)
    given, found = (gather_times.us(problem, one.tiles) for one in (config, best))
    is_faster = found < (1 - gather_times.MARGIN) * given
    if problem.types.scales is not None:
        return dataclasses.replace(config, tiles=best.tiles) if is_faster else config
    if is_faster:
        return best
    chunk = max(config.chunk_columns, best.chunk_columns)
    return dataclasses.replace(config, chunk_columns=chunk)
