"""`lhs @ rhs`: the persistent, warp-specialised Hopper matmul that all kernels share.

A block has three warpgroups. Two multiply: each holds half the rows of a tile in its accumulator.
The warps of the third do everything else: one loads tiles of lhs and rhs into a ring of
`num_stages` slots of shared memory, one stores finished tiles, one runs `communicate`, whatever a
fused kernel has to move meanwhile, and one looks out for lhs that has yet to arrive. What takes
long or waits for others is theirs: while a multiplying warpgroup signals or waits for a semaphore,
its tensor cores idle, and where it does the latter the assembler serialises them (ptxas, C7520).

A fused kernel says where tiles come from and go to with `Hooks`, and is otherwise the plain matmul:
it copies none of it. `matmul_roles.py` has what each warp does.
"""

from __future__ import annotations

from typing import Any

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed.kernel import THREAD_AXIS
from stretto.kernels.engine import matmul_roles
from stretto.kernels.engine.matmul_hooks import Addends, Gate, Hooks
from stretto.kernels.engine.tile_config import (
    MULTIPLYING_WARPGROUPS,
    REGISTERS,
    REGISTERS_WITH_ADDENDS,
    TileConfig,
)

__all__ = ["Addends", "Gate", "Hooks", "run"]


def run(
    hooks: Hooks, config: TileConfig, *, num_tiles: int, k: int, num_blocks: int, **scratch: Any
) -> None:
    """The body of a matmul kernel: every warpgroup of every block calls it once.

    Args:
      hooks: what this kernel makes of it.
      config: the tiles.
      num_tiles: of the whole device; block `b` takes tiles `b`, `b + num_blocks`, ...
      k: length of the contraction.
      num_blocks: blocks of the grid.
      **scratch: the refs of `tile_config.scratch`, and of `tile_config.gate_scratch` with a gate,
        of `tile_config.addend_scratch` with addends.
    """
    roles = matmul_roles.Roles.of_block(hooks, config, num_tiles, k, num_blocks, scratch)
    warpgroup = lax.axis_index(THREAD_AXIS)
    loading, multiplying = REGISTERS if hooks.addends is None else REGISTERS_WITH_ADDENDS

    @pl.when(warpgroup < MULTIPLYING_WARPGROUPS)
    def _():
        plgpu.set_max_registers(multiplying, action="increase")
        roles.multiply()

    @pl.when(warpgroup == MULTIPLYING_WARPGROUPS)
    def _():
        plgpu.set_max_registers(loading, action="decrease")
        warps = [roles.load, roles.store]
        if hooks.communicate is not None:
            warps.append(roles.communicate)
        if hooks.gate is not None:
            warps.append(roles.look_out)

        @plgpu.warp_map
        def _(warp):
            for index, role in enumerate(warps):
                pl.when(warp == index)(role)
