"""The warps of a block: which role has which, and how many registers their threads take."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed.kernel import THREAD_AXIS
from stretto.kernels.engine import registers
from stretto.kernels.engine.mainloop import Role

WARPS_OF_A_WARPGROUP = 4


def with_fewer_registers(roles: Sequence[Role], taken: int, of_warps: int) -> list[Role]:
    """Roles of whole warpgroups leave `taken` registers of each thread of one more.

    `of_warps` are the warpgroups of single warps, which keep theirs.
    """
    kept = registers.of_single_warps(roles) or 0
    others = sum(role.warpgroups for role in roles)
    warpgroups = others + 1 + of_warps
    left = warpgroups * registers.even_share(warpgroups) - taken - kept * of_warps
    most = left // others // 8 * 8
    return [
        role._replace(registers=min(role.registers, most))
        if role.warpgroups and role.registers
        else role
        for role in roles
    ]


def assign(roles: Sequence[Role], warpgroups: int) -> None:
    """Gives roles their warpgroups, and four single warps each of the last ones."""
    even_share = registers.even_share(warpgroups)
    warpgroup = lax.axis_index(THREAD_AXIS)

    def set_registers(count: int | None) -> None:
        if count is not None:
            action = "increase" if count > even_share else "decrease"
            plgpu.set_max_registers(count, action=action)

    first = 0
    for role in roles:
        if role.warpgroups:
            last = first + role.warpgroups
            inside = warpgroup < last if first == 0 else (warpgroup >= first) & (warpgroup < last)

            @pl.when(inside)
            def _(role=role):
                set_registers(role.registers)
                role.run()

            first = last
    warps = [role for role in roles if not role.warpgroups]
    for number, batch in enumerate(itertools.batched(warps, WARPS_OF_A_WARPGROUP)):

        @pl.when(warpgroup == first + number)
        def _(batch=batch):
            set_registers(registers.of_single_warps(roles))

            @plgpu.warp_map
            def _(warp: jax.Array) -> None:
                for index, role in enumerate(batch):
                    pl.when(warp == index)(role.run)
