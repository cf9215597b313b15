"""What operations cost in time, for a prediction of how long a kernel would take."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any


@dataclasses.dataclass(kw_only=True)
class CostModel:
    """Rates of a device and its links.

    The blocks resident on a device share its rates evenly: a device of 132 blocks has 1/132 of the
    matmul rate in each. So a kernel may be simulated with fewer, larger blocks than it runs with.

    Attributes:
      matmul_flops: floating point operations per second of all tensor cores of a device.
      link_bandwidth: bytes per second that a device can send over all its links, and receive.
      memory_bandwidth: bytes per second between global memory (or its cache) and shared memory.
      link_latency: seconds from the issue of a remote copy to the arrival of its first byte.
      memory_latency: the same for a copy within the device.
      signal_latency: seconds from a signal to the end of the wait for it.
      launch_latency: seconds for a launch, the barrier between devices before it included.
    """

    matmul_flops: float = 650e12
    link_bandwidth: float = 350e9
    memory_bandwidth: float = 5.5e12
    link_latency: float = 2e-6
    memory_latency: float = 0.7e-6
    signal_latency: float = 1e-6
    launch_latency: float = 20e-6

    def start(self, machine: Any) -> CostModel:
        """A copy of the model with the state of one launch."""
        model = copy.copy(self)
        model._machine = machine
        model._send_free = {}
        model._receive_free = {}
        model._memory_free = {}
        model._busy = [0.0] * machine.mesh.num_devices
        return model

    def matmul(self, task: Any, flops: int) -> None:
        """A tensor core operation of `task`: its time goes on by what it takes."""
        machine = self._machine
        blocks = min(len(task.device.blocks), machine.limits.resident_blocks)
        # The warpgroups of a block take turns at its tensor cores, so the block's time is serial.
        begin = max(task.time, task.block.time)
        task.time = begin + flops * blocks / self.matmul_flops
        task.block.time = task.time
        self._busy[task.device.index] += flops / self.matmul_flops

    def copy_start(self, copy: Any, num_bytes: int) -> float:
        """When the source of a copy out of shared memory has been read."""
        return copy.time

    def copy_end(self, copy: Any, source: int, destination: int, num_bytes: int) -> float:
        """When a copy from device `source` to device `destination` has landed."""
        if source == destination:
            begin = max(copy.time, self._memory_free.get(source, 0.0))
            self._memory_free[source] = end = begin + num_bytes / self.memory_bandwidth
            return end + self.memory_latency
        seconds = num_bytes / self.link_bandwidth
        sent = max(copy.time, self._send_free.get(source, 0.0)) + seconds
        self._send_free[source] = sent
        landed = max(sent, self._receive_free.get(destination, 0.0) + seconds)
        self._receive_free[destination] = landed
        return landed + self.link_latency

    def finish(self) -> tuple[float, float]:
        """(seconds of the launch, mean seconds that a device's tensor cores were busy)."""
        devices = self._machine.devices
        total = max((d.time for d in devices), default=0.0) + self.launch_latency
        return total, sum(self._busy) / max(len(devices), 1)


class NoCost(CostModel):
    """Everything takes no time."""

    def matmul(self, task: Any, flops: int) -> None:
        """Takes no time."""

    def copy_end(self, copy: Any, source: int, destination: int, num_bytes: int) -> float:
        """Lands at once."""
        return copy.time

    def finish(self) -> tuple[float, float]:
        """No time."""
        return 0.0, 0.0
