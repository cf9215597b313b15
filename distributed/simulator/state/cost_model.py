"""What operations cost in time, for a prediction of how long a kernel would take."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class CostModel:
    """Rates of a device and its links; the defaults are those of an H100 on NVLink.

    The resident blocks of a device share its rates: with `n` of them each has 1/n of the matmul
    rate, so a kernel may be simulated with fewer blocks than it runs with. Copies within a device
    share its memory bandwidth, and those between devices the bandwidth of sender and receiver, in
    the order in which they are issued.

    Attributes:
      matmul_flops: floating point operations per second of all tensor cores of a device.
      link_bandwidth: bytes per second that a device can send over all its links, and receive.
      memory_bandwidth: bytes per second between global memory (or its cache) and shared memory.
      link_latency: seconds from the issue of a remote copy to its end, beside its bytes.
      memory_latency: the same for a copy within the device.
      signal_latency: seconds until a signal is seen by another device.
      launch_latency: seconds for a launch, the barrier between devices before it included.
    """

    matmul_flops: float = 760e12
    link_bandwidth: float = 290e9
    memory_bandwidth: float = 10e12
    link_latency: float = 2e-6
    memory_latency: float = 0.7e-6
    signal_latency: float = 1e-6
    launch_latency: float = 18e-6

    def scaled(self, *, rows: int = 1, columns: int = 1, depth: int = 1) -> CostModel:
        """Rates with which a small matmul stands for one that is larger along its dimensions.

        A matmul of `m x k x n` simulated under `scaled(rows=a, depth=b, columns=c)` takes the time
        of one of `(a m) x (b k) x (c n)` whose left operand travels: arithmetic and loads grow with
        all three, what is sent with `a b`. The number of tiles that a block gets should be like
        that of the large one, so take as many fewer blocks as there are fewer tiles.
        """
        work = rows * columns * depth
        return dataclasses.replace(
            self,
            matmul_flops=self.matmul_flops / work,
            memory_bandwidth=self.memory_bandwidth / work,
            link_bandwidth=self.link_bandwidth / (rows * depth),
        )


class Clock:
    """Keeps the time of one launch under a cost model, or none.

    Args:
      model: the rates; without them nothing takes time.
      machine: the launch.
    """

    def __init__(self, model: CostModel | None, machine: Any):
        self._model = model
        self._machine = machine
        count = machine.mesh.num_devices
        self._send_free = [0.0] * count
        self._receive_free = [0.0] * count
        self._memory_free = [0.0] * count
        self._busy = [0.0] * count

    @property
    def signal_latency(self) -> float:
        """Seconds until a signal is seen by another device."""
        return self._model.signal_latency if self._model else 0.0

    def matmul(self, task: Any, flops: int) -> None:
        """A tensor core operation of `task`, whose time goes on by what it takes."""
        if self._model is None:
            return
        device, block = task.device, task.block
        sharing = min(len(device.blocks), self._machine.limits.resident_blocks)
        # Warpgroups take turns at the tensor cores of their block's multiprocessor.
        begin = max(task.time, block.tensor_free)
        task.time = block.tensor_free = begin + flops * sharing / self._model.matmul_flops
        self._busy[device.index] += flops / self._model.matmul_flops

    def copy_end(self, begin: float, source: int, destination: int, num_bytes: int) -> float:
        """When a copy issued at `begin` from device `source` to device `destination` has landed."""
        model = self._model
        if model is None:
            return begin
        if source == destination:
            begin = max(begin, self._memory_free[source])
            self._memory_free[source] = begin + num_bytes / model.memory_bandwidth
            return self._memory_free[source] + model.memory_latency
        seconds = num_bytes / model.link_bandwidth
        begin = max(begin, self._send_free[source], self._receive_free[destination])
        self._send_free[source] = self._receive_free[destination] = begin + seconds
        return begin + seconds + model.link_latency

    def finish(self) -> tuple[float, float]:
        """(seconds of the launch, mean seconds that a device's tensor cores were busy)."""
        if self._model is None:
            return 0.0, 0.0
        total = max(d.time for d in self._machine.devices) + self._model.launch_latency
        return total, sum(self._busy) / len(self._busy)
