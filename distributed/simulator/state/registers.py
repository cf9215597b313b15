"""The registers of a block, which its warpgroups give to each other (`setmaxnreg`).

A block starts with as many for each thread as the assembler may use: an even share of the
multiprocessor's, rounded down to a multiple of 8. What the rounding leaves over belongs to no
block. A warpgroup that wants more waits until others have given back enough (PTX, `setmaxnreg`).
"""

from __future__ import annotations

from typing import Any

REGISTERS = 64 * 1024
"""Registers of a multiprocessor, of 32 bits."""
FEWEST, MOST = 24, 256
"""Registers of a thread, as `setmaxnreg` takes them."""
THREADS = 128
"""Threads of a warpgroup."""


def at_start(warpgroups: int) -> int:
    """Registers of each thread of a block of so many warpgroups."""
    return min(MOST, REGISTERS // (THREADS * warpgroups) // 8 * 8)


class Registers:
    """Those of one block.

    Attributes:
      held: of each thread, by warpgroup.
      total: of a thread of each warpgroup, added up.
      waiters: tasks that wait for more.
    """

    def __init__(self, warpgroups: int):
        self.held = [at_start(warpgroups)] * warpgroups
        self.total = sum(self.held)
        self.waiters: list[Any] = []

    def has_room_for(self, warpgroup: int, count: int) -> bool:
        """Whether a warpgroup can have `count` of each thread now."""
        return sum(self.held) - self.held[warpgroup] + count <= self.total

    def describe(self, warpgroup: int, count: int) -> str:
        """A wait for `count` in words."""
        held = " + ".join(str(one) for one in self.held)
        return (
            f"set_max_registers({count}) of warpgroup {warpgroup}: its block has {self.total} for a"
            f" thread of each warpgroup, {THREADS * self.total} in all, and they hold {held}"
        )
