"""The configuration of a fused matmul that adds its peers' products."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import ClassVar, Self

from stretto.distributed.schedule import ceil_div
from stretto.kernels.engine.architectures import (
    TileConfig,
    check_tiles,
    scales_bytes,
    tiles_for,
)
from stretto.kernels.engine.hopper import tile_config
from stretto.kernels.engine.shared_memory import SMEM_BYTES, SWIZZLE_BYTES
from stretto.kernels.engine.waves import Result
from stretto.kernels.fused.obstacles import check_pull_slots, check_unfused
from stretto.kernels.problem.machine import HOPPER
from stretto.kernels.problem.problem import Problem

FEW_ROWS = 1024
"""The most rows of an unfused call: with more, communication is long and must be overlapped."""
OWN_LAG = 3
NARROW_BYTES = 2  # of an element, where no problem says its type
PIECE_ROWS = 64
PIECE_BYTES = PIECE_ROWS * SWIZZLE_BYTES


@dataclasses.dataclass(frozen=True, kw_only=True)
class AddConfig:
    """The configuration of every matmul with a reduction.

    Attributes:
      tiles: of the matmul.
      pull_slots: pieces of 64 rows x 128 bytes on their way at once, per block.
      own_last: whether all tiles of the own rows follow all tiles for peers, or each of them some
        waves after the same tile for the peers (`tiles.OwnersOrder`, with a lag of `OWN_LAG`).
      unfused: multiply by XLA's matmul, and add up with a separate kernel; the other fields are
        then ignored.
    """

    full_waves: ClassVar[bool] = True
    """Whether blocks may share the tiles of a full wave, too (`remainder.Sharing`)."""

    tiles: TileConfig = tile_config.LARGE
    pull_slots: int = 2
    own_last: bool = True
    unfused: bool = False

    def check(self, problem: Problem) -> None:
        """Raises ValueError unless the kernel can be built so for `problem`."""
        check_tiles(self.tiles, problem)
        check_pull_slots(self.pull_slots)
        check_unfused(self.unfused, problem)
        needed = self.smem_bytes(problem.types.itemsize) + scales_bytes(self.tiles, problem)
        if needed > SMEM_BYTES:
            raise ValueError(
                f"the kernel needs {needed} bytes of shared memory and a block has"
                f" {SMEM_BYTES}; take fewer stages or buffers."
            )

    @property
    def own_lag(self) -> int | None:
        """What `tiles.OwnersOrder` calls `lag`."""
        return None if self.own_last else OWN_LAG

    @classmethod
    def result_of(cls, problem: Problem) -> Result:
        """The products of all rows on one device, which are tiled owner by owner."""
        k = ceil_div(problem.sizes["k"], problem.devices)
        result = Result.of(problem, problem.sizes["n"], k)
        return dataclasses.replace(result, full_waves=cls.full_waves)

    def smem_bytes(self, itemsize: int) -> int:
        """Shared memory of a block, in bytes."""
        return self.tiles.smem_bytes(itemsize, addends=True) + self.pull_slots * PIECE_BYTES

    @classmethod
    def candidates(cls, problem: Problem | None = None) -> Iterator[Self]:
        """The configurations that the tuner tries, for one problem or for all."""
        few = problem is not None and problem.sizes["m"] <= FEW_ROWS
        itemsize = NARROW_BYTES if problem is None else problem.types.itemsize
        if problem is None or (few and problem.types.scales is None):
            yield cls(unfused=True)
        options = [(2, cls.own_last)] if few else [(2, True), (2, False), (3, cls.own_last)]
        tiles = tiles_for(problem)
        result = None if problem is None else cls.result_of(problem)
        sharing = () if result is None or not result.rhs_within else tiles.sharing
        for tile in (*tiles.adding, *sharing):
            if result is not None and tile.most_parts > 1 and not result.shares(tile):
                continue  # It is another one of them.
            for pull_slots, own_last in options:
                config = cls(tiles=tile, pull_slots=pull_slots, own_last=own_last)
                needed = config.smem_bytes(itemsize)
                needed += scales_bytes(tile, problem) if problem is not None else 0
                if needed <= SMEM_BYTES:
                    yield config


FITTED_MARGIN = 0.02
"""By which tiles must be faster to serve in place of those that were fastest at near sizes."""


def time(config: AddConfig, problem: Problem) -> float:
    """Of the waves of tiles, for comparison: elements that a multiprocessor makes."""
    return config.result_of(problem).time(config.tiles)


def fitted[C: AddConfig](
    config: C, problem: Problem, default: C, time: Callable[[C, Problem], float] = time
) -> C:
    """What was fastest at other sizes; or `default`, if it takes less `time` at these."""
    is_known = problem.machine.architecture == HOPPER and problem.types.scales in (None, "row")
    if config.unfused or not is_known:
        return config
    given, found = time(config, problem), time(default, problem)
    return default if found < (1 - FITTED_MARGIN) * given else config


def may_share(problem: Problem) -> bool:
    """Whether it is known how long products take whose tiles blocks share by default."""
    return problem.machine.architecture == HOPPER and problem.types.scales is None


def default_tiles(problem: Problem, *, scattered: bool = False) -> TileConfig:
    """The tiles for a problem that no table has."""
    tiles, result = tiles_for(problem), AddConfig.result_of(problem)
    if may_share(problem) and result.waves(tiles.adding[0]) == 1:
        return tiles.adding[0]
    return tiles.adding_for(result, wide=problem.types.out == "float32", scattered=scattered)
