"""The times of a gather under a matmul, by rates: which tiles serve, and how many gates."""

from __future__ import annotations

from stretto.distributed.schedule import ceil_div
from stretto.kernels.engine.architectures import TileConfig, tiles_for
from stretto.kernels.engine.waves import Result
from stretto.kernels.problem.machine import HOPPER
from stretto.kernels.problem.problem import Problem

STEPS_IN_A_US, SENT_IN_A_US = 128 * 256 / 0.7, 245e3
"""Elements of results that a multiprocessor adds a step of `tile_k` to, and bytes that one device
sends beside a matmul, in a microsecond."""
MARGIN = 0.03
"""By which other tiles must be faster than large ones, which read less."""
GATES, GATES_OF_HIDDEN = 4, 2
"""Waits along the contraction of a tile; fewer where the transfer of a shard is over (`HIDDEN`)
before its tiles begin. On two H200s five in place of two cost 6% at 5120 x 5120 x 13824."""
HIDDEN = 0.75
"""The share of a shard's arithmetic that the transfer of the next one may take for that."""


def result_of(problem: Problem) -> Result:
    """The result of an all-gather matmul on one device: shard after shard."""
    return Result(
        shards=problem.devices,
        rows=ceil_div(problem.sizes["m"], problem.devices),
        columns=ceil_div(problem.sizes["n"], problem.devices),
        multiprocessors=problem.machine.multiprocessors,
    )


def tiles_in_shards(problem: Problem) -> TileConfig:
    """The tiles with which the matmul of a shard after another ends soonest.

    Smaller tiles may fill the last wave better, and the transfer, which is hidden under all waves
    but one, better if there are few. Large ones serve unless others are faster by `MARGIN`.
    """
    tiles, result = tiles_for(problem), result_of(problem)
    large = tiles.large_for(result.rows)
    if problem.types.scales is not None or problem.machine.architecture != HOPPER:
        return large
    fastest = min((large, *tiles.gathering), key=lambda tile: us(problem, tile))
    return fastest if us(problem, fastest) < (1 - MARGIN) * us(problem, large) else large


def us(problem: Problem, tile: TileConfig) -> float:
    """Microseconds of all waves, and of what is sent beyond all waves but one."""
    result = result_of(problem)
    arithmetic = _arithmetic_us(problem, tile)
    before_last = arithmetic * (1 - 1 / result.waves(tile))
    return arithmetic + max(0.0, (problem.devices - 1) * _sent_us(problem) - before_last)


def gates(problem: Problem, tile: TileConfig) -> int:
    """Waits along the contraction of a tile, where one shard is multiplied after the other."""
    if problem.types.scales is not None or problem.machine.architecture != HOPPER:
        return GATES
    of_a_shard = _arithmetic_us(problem, tile) / problem.devices
    return GATES_OF_HIDDEN if _sent_us(problem) <= HIDDEN * of_a_shard else GATES


def _arithmetic_us(problem: Problem, tile: TileConfig) -> float:
    """Of all shards."""
    steps = ceil_div(problem.sizes["k"], tile.tile_k)
    return result_of(problem).time(tile) * steps / STEPS_IN_A_US


def _sent_us(problem: Problem) -> float:
    """Of one shard."""
    rows = ceil_div(problem.sizes["m"], problem.devices)
    return rows * problem.sizes["k"] * problem.types.itemsize / SENT_IN_A_US
