"""The registers of a block: with how many it starts, and whether its roles take more."""

from __future__ import annotations

from collections.abc import Sequence

from stretto.kernels.engine.mainloop import Role

REGISTERS = 65536
"""Of a multiprocessor, of 32 bits."""
MOST = 256
"""Of a thread."""


def even_share(warpgroups: int) -> int:
    """Registers of each thread that a block of so many warpgroups starts with.

    Together they have no more later: what the rounding leaves over is no block's.
    """
    return min(MOST, REGISTERS // (128 * warpgroups) // 8 * 8)


def of_single_warps(roles: Sequence[Role]) -> int | None:
    """Of each thread of the warpgroups that single warps share; None for the even share."""
    warps = (role for role in roles if not role.warpgroups)
    return max((role.registers for role in warps if role.registers), default=None)


def check(name: str, roles: Sequence[Role], warpgroups: int) -> None:
    """Raises ValueError if the roles take more registers than the block starts with."""
    share = even_share(warpgroups)
    taken = [role.registers for role in roles for _ in range(role.warpgroups)]
    taken += [of_single_warps(roles)] * (warpgroups - len(taken))
    counts = [share if count is None else count for count in taken]
    if sum(counts) > warpgroups * share:
        raise ValueError(
            f"kernel {name}: its roles take {' + '.join(map(str, counts))} registers for a thread"
            f" of each warpgroup, and a block of {warpgroups} warpgroups starts with {share}"
            f" each, {warpgroups * share} together; a role would wait for the others' for ever."
        )
