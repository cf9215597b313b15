"""`out = all_reduce(lhs @ rhs)`, the reduction under the matmul.

`matmul_reduce_scatter`, whose owners store each finished tile on every device: the second half of
a two-shot all-reduce. All devices hold bitwise the same result, since each element is summed once,
by its owner. Protocol and device code are in `matmul_reduce_scatter.py`.

Own tiles alternate with those for peers. If all own tiles were last, a device would have to send
its whole result in the last part of its time, faster than the links allow.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from stretto.distributed.schedule import ceil_div
from stretto.kernels.engine.hopper.tile_config import NARROW
from stretto.kernels.engine.waves import SENT_IN_A_US
from stretto.kernels.fused import copied, matmul_reduce_scatter, obstacles, unfused
from stretto.kernels.fused.add_config import AddConfig, default_tiles, fitted, result_of
from stretto.kernels.fused.obstacles import obstacle
from stretto.kernels.operation import Call, Kernel
from stretto.kernels.problem.problem import Problem


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(AddConfig):
    """Configuration of the fused kernel; by default own tiles alternate with those for peers."""

    own_last: bool = False


def default_config(problem: Problem) -> Config:
    """The configuration for a problem that no table has.

    Narrow tiles are faster with all own ones last (on 2 H200s 1.14 in place of 1.19 of XLA's matmul
    at 5120 x 13824 x 5120), where the links carry the sums in the time of the own tiles.
    """
    tiles, result = default_tiles(problem), result_of(problem)
    if tiles != NARROW or result.waves(tiles) == 1:
        return Config(tiles=tiles)
    sent = result.rows * result.columns * problem.types.out_itemsize * (problem.devices - 1)
    of_own = result.us(tiles, ceil_div(problem.sizes["k"], problem.devices)) / problem.devices
    return Config(tiles=tiles, own_last=sent / SENT_IN_A_US <= of_own)


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
    fitted=lambda config, problem: fitted(config, problem, default_config(problem)),
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
