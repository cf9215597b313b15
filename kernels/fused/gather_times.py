"""How an all-gather matmul is cut up: the tiles that end soonest, by rates, and its waits."""

from __future__ import annotations

from collections.abc import Sequence

from stretto.distributed.schedule import ceil_div
from stretto.kernels.engine.architectures import TileConfig, tiles_for
from stretto.kernels.engine.waves import SENT_IN_A_US, Result
from stretto.kernels.fused.pull_config import PullConfig
from stretto.kernels.problem.machine import HOPPER
from stretto.kernels.problem.problem import Problem

MARGIN = 0.03
"""By which other tiles must be faster than large ones, which read less."""

MUCH_LONGER = 1.5
"""Sending, than the products. At 8384 x 6480 x 816 on two H200s, 222 us beside some 127, pairs of
blocks that leave 4 tiles to another wave took 268, and tiles that all are in flight 247."""

GATES = 4
"""Waits of a tile along its contraction. On two H200s one, two and four took as long, and five 5%
longer (5120 x 5120 x 13824, tiles of 192 columns); on four H100s one and two took longer."""


def chunk_columns(problem: Problem, gates: int = GATES) -> int:
    """Columns of a shard that a tile waits for at once, if it waits so many times at most."""
    piece = PullConfig.pull_columns
    return piece * max(1, ceil_div(problem.sizes["k"], gates * piece))


def chunks(problem: Problem | None) -> Sequence[int]:
    """The chunks that the tuner tries: for all problems, or those of few waits for one."""
    if problem is None:
        return 1024, 2048, 4096
    return [*dict.fromkeys(chunk_columns(problem, gates) for gates in (GATES, GATES // 2))]


def tiles_in_shards(problem: Problem) -> TileConfig:
    """The tiles with which the matmul of a shard after another ends soonest.

    Smaller tiles may fill the last wave better, and the transfer, which is hidden under all waves
    but one, better if there are few. Large ones serve unless others are faster by `MARGIN`.
    """
    tiles = tiles_for(problem)
    large = tiles.large_for(_result(problem).rows)
    if not are_known(problem):
        return large
    if tiles.sharing and _is_narrow_and_long(problem):
        return tiles.sharing[0]
    fastest = min((large, *gathering(problem)), key=lambda tile: us(problem, tile))
    return fastest if us(problem, fastest) < (1 - MARGIN) * us(problem, large) else large


def _is_narrow_and_long(problem: Problem) -> bool:
    """Whether few columns wait for many rows of peers: blocks then load them in pairs.

    A row of rhs is less than a line of the L2, and every block loads all of them. On two H200s
    pairs took 0.86, 0.88, 0.92, 0.97, 1.01 and 1.01 of the time of tiles of 64 columns where
    sending takes `MUCH_LONGER` than their products, and 1.03 to 1.17 elsewhere.
    """
    result, narrowest = _result(problem), tiles_for(problem).narrowest
    if not result.rhs_within or result.columns > narrowest.tile_n:
        return False
    return _sent_us(problem) >= MUCH_LONGER * result.us(narrowest, problem.sizes["k"])


def gathering(problem: Problem) -> tuple[TileConfig, ...]:
    """Tiles beside large ones: the narrowest for as few columns, those that blocks would share
    where they do."""
    tiles, result = tiles_for(problem), _result(problem)
    found = tiles.gathering + (tiles.sharing if result.rhs_within else ())
    if result.columns > tiles.narrowest.tile_n:
        found = tuple(tile for tile in found if tile != tiles.narrowest)
    return tuple(tile for tile in found if tile.most_parts == 1 or result.shares(tile))


def are_known(problem: Problem) -> bool:
    """Whether the rates are those of such a problem."""
    return problem.machine.architecture == HOPPER and problem.types.scales in (None, "row")


def us(problem: Problem, tile: TileConfig) -> float:
    """Microseconds of all waves, and of what is sent beyond all waves but one.

    Where sending takes much longer than the products, tiles of the last shard that are in flight
    end soon after the last chunk, and those that are not take waves of their own.
    """
    k, result = problem.sizes["k"], _result(problem)
    arithmetic, waves = result.us(tile, k), result.waves(tile)
    sent = _sent_us(problem)
    hidden = arithmetic + max(0.0, sent - arithmetic * (1 - 1 / waves))
    if sent < MUCH_LONGER * arithmetic:
        return hidden
    together = result.multiprocessors // tile.blocks
    left = max(0, ceil_div(result.tiles(tile) // result.shards - together, together))
    return min(hidden, sent + arithmetic / waves * (left + 1 / GATES))


def _sent_us(problem: Problem) -> float:
    """Microseconds in which a device sends its shard to all others."""
    shard = _result(problem).rows * problem.sizes["k"] * problem.types.itemsize
    return shard * (problem.devices - 1) / SENT_IN_A_US


def _result(problem: Problem) -> Result:
    """The result of an all-gather matmul on one device: shard after shard."""
    columns = ceil_div(problem.sizes["n"], problem.devices)
    return Result.of(problem, columns, problem.sizes["k"], own=1 / problem.devices)
