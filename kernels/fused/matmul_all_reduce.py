"""`out = all_reduce(lhs @ rhs)`, the reduction under the matmul.

`matmul_reduce_scatter`, whose owners store each finished tile on every device: the second half of
a two-shot all-reduce. All devices hold bitwise the same result, since each element is summed once,
by its owner. Protocol and device code are in `matmul_reduce_scatter.py`.

Own tiles alternate with those for peers. If all own tiles were last, a device would have to send
its whole result in the last part of its time, which the links allow where the contraction is long.

A wave's sums leave together, when it ends. Those of the last wave have no products to hide them.
So where few tiles are left over, blocks share these: few sums are then left to send, and the
products of the shared tiles hide the sums of the wave before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax

from stretto.distributed.schedule import ceil_div
from stretto.kernels.engine.architectures import TileConfig, tiles_for
from stretto.kernels.engine.hopper.tile_config import NARROW
from stretto.kernels.engine.waves import SENT_IN_A_US
from stretto.kernels.fused import copied, matmul_reduce_scatter, obstacles, unfused
from stretto.kernels.fused.add_config import AddConfig, default_tiles, fitted, may_share, time
from stretto.kernels.fused.obstacles import obstacle
from stretto.kernels.operation import Call, Kernel
from stretto.kernels.problem.problem import Problem


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(AddConfig):
    """Configuration of the fused kernel; by default own tiles alternate with those for peers."""

    full_waves: ClassVar[bool] = False  # Their sums would all be sent after the last product.

    own_last: bool = False


LEAST_GAIN = 0.02
"""Of the time: with less to gain the last wave is not shared."""


def default_config(problem: Problem) -> Config:
    """The configuration for a problem that no table has."""
    whole = _of_whole_tiles(problem)
    if not may_share(problem) or problem.types.out == "float32":
        return whole
    shares = Config.result_of(problem).shares
    shared = [
        Config(tiles=tiles, own_last=True)
        for tiles in tiles_for(problem).summing
        if shares(tiles) and _own_are_last(problem, tiles)
    ]
    best = min(shared, key=lambda config: _us(config, problem), default=whole)
    return best if _us(best, problem) < (1 - LEAST_GAIN) * _us(whole, problem) else whole


def _of_whole_tiles(problem: Problem) -> Config:
    """The configuration whose tiles are a block's each.

    Narrow tiles are faster with all own ones last (on 2 H200s 1.14 in place of 1.19 of XLA's matmul
    at 5120 x 13824 x 5120), where the links carry the sums in the time of the own tiles.
    """
    tiles = default_tiles(problem)
    if tiles != NARROW or Config.result_of(problem).waves(tiles) == 1:
        return Config(tiles=tiles)
    return Config(tiles=tiles, own_last=_own_are_last(problem, tiles))


def _own_are_last(problem: Problem, tiles: TileConfig) -> bool:
    """Whether the links carry all sums in the time of the own tiles."""
    result = Config.result_of(problem)
    sent = result.rows * result.columns * _sent(problem)
    return sent / SENT_IN_A_US <= result.us(tiles, _contraction(problem)) / problem.devices


def _us(config: Config, problem: Problem) -> float:
    """Microseconds of the products, and of the sums that are still on their way after them.

    All own tiles of the last wave end together, whether the others were in between or before.
    """
    result, k = Config.result_of(problem), _contraction(problem)
    return result.us(config.tiles, k) + result.us_after(config.tiles, k, _sent(problem))


def _fitted(config: Config, problem: Problem) -> Config:
    """What was fastest at other sizes, or the default, if it ends sooner at these."""
    return fitted(config, problem, default_config(problem), _us if may_share(problem) else time)


def _contraction(problem: Problem) -> int:
    """The length of the contraction on a device."""
    return ceil_div(problem.sizes["k"], problem.devices)


def _sent(problem: Problem) -> int:
    """Bytes that the owner of an element of the sum sends."""
    return problem.types.out_itemsize * (problem.devices - 1)


def run(operands: tuple[Sequence[jax.Array], Sequence[jax.Array]], call: Call) -> jax.Array:
    """The sum of `[m, k_i] @ [k_i, n]`, everywhere -> `[m, n]`, as the public operation."""
    if call.config.unfused:
        return unfused.matmul_all_reduce(operands, call)
    out = matmul_reduce_scatter.sharded(operands, call, everywhere=True)
    return out.reshape(-1, out.shape[2])[: operands[0][0].shape[0]]


KERNEL = Kernel(
    Config=Config,
    run=run,
    obstacle=obstacle,
    default=default_config,
    fitted=_fitted,
    candidates=Config.candidates,
    copies=copied.everywhere,
    apart=unfused.by_sum(Config(unfused=True)),
)


def scaled(operands: Any, call: Call) -> jax.Array:
    """The same of one pair in 8 bits, as `matmul_reduce_scatter.scaled` takes it."""
    out = matmul_reduce_scatter.scaled(operands, call, everywhere=True)
    return out.reshape(-1, out.shape[2])[: operands[0][0].shape[0]]


SCALED = dataclasses.replace(
    KERNEL, run=scaled, obstacle=obstacles.scaled, untried=True, apart=None
)
