"""One device of the machine that a launch runs on."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable

from stretto.distributed.simulator.state import clocks
from stretto.distributed.simulator.state.memory import Buffer
from stretto.distributed.simulator.state.mesh import DeviceMesh
from stretto.distributed.simulator.state.races import Access
from stretto.distributed.simulator.state.semaphores import SemaphoreArray
from stretto.distributed.simulator.state.tasks import Block


class Device:
    """One device: its memory, its blocks, and who else has touched it.

    Attributes:
      index: row-major in the mesh.
      coords: index along each axis of the mesh.
      buffers: global memory of the launch, by argument.
      operands: those of the buffers that are operands, and not a result's memory, too.
      semaphores: by allocation key.
      waiting_blocks: blocks that are not resident yet.
      clock: what all its finished tasks knew.
      start: the timeline whose first stretch is the device's start.
      remote_touches: the last access of each timeline of another device to this one's memory.
    """

    def __init__(self, index: int, mesh: DeviceMesh):
        self.index = index
        self.coords = mesh.coords(index)
        self._name = mesh.describe(index)
        self.buffers: list[Buffer] = []
        self.operands: list[Buffer] = []
        self.semaphores: dict[Hashable, SemaphoreArray] = {}
        self.blocks: list[Block] = []
        self.waiting_blocks: deque[Block] = deque()
        self.resident = 0
        self.clock = clocks.empty()
        self.remote_touches: dict[int, Access] = {}
        self.start = 0
        self.time = 0.0

    def describe(self) -> str:
        """The device in words."""
        return self._name
