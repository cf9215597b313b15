"""The machine that a launch runs on: devices with their blocks, memory and semaphores."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from stretto.distributed.simulator.checks import Checks
from stretto.distributed.simulator.program import KernelInfo, Program
from stretto.distributed.simulator.reports.report import Report
from stretto.distributed.simulator.reports.trace import Trace
from stretto.distributed.simulator.scheduler import Scheduler
from stretto.distributed.simulator.state import clocks
from stretto.distributed.simulator.state.allocations import like, shared_bytes
from stretto.distributed.simulator.state.barriers import BarrierArray
from stretto.distributed.simulator.state.cost_model import Clock, CostModel
from stretto.distributed.simulator.state.device import Device
from stretto.distributed.simulator.state.freed import inherit
from stretto.distributed.simulator.state.mail import Mail
from stretto.distributed.simulator.state.memory import Buffer
from stretto.distributed.simulator.state.mesh import DeviceMesh
from stretto.distributed.simulator.state.races import Access, RaceDetector
from stretto.distributed.simulator.state.registers import Registers
from stretto.distributed.simulator.state.semaphores import SemaphoreArray
from stretto.distributed.simulator.state.tasks import Block, Task
from stretto.distributed.simulator.state.tensor_cores import TensorCores


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a device can hold, and what a run may take.

    Attributes:
      resident_blocks: blocks that run at once on one device; the others wait for one to end.
      max_steps: steps of a launch before it is given up.
    """

    resident_blocks: int = 132
    max_steps: int = 50_000_000


class Machine:
    """One launch of a kernel on all devices of a mesh.

    Args:
      kernel: the kernel.
      program: its body.
      mesh: the mesh.
      scheduler, report, limits: how to run, where to tell, how far to go.
      detect_races: whether accesses are checked.
      check_hardware: whether to report what no GPU does.
      cost: what things cost in time.
      trace: where what tasks do is noted.
      has_start_barrier: no device starts before all have; else one may touch a peer's memory only
        after a word from it.
      mail: the heap's messages, which outlive the launch.
    """

    def __init__(
        self,
        kernel: KernelInfo,
        program: Program,
        mesh: DeviceMesh,
        *,
        scheduler: Scheduler,
        report: Report,
        limits: Limits,
        detect_races: bool,
        check_hardware: bool,
        cost: CostModel | None,
        trace: Trace | None = None,
        has_start_barrier: bool = True,
        mail: Mail | None = None,
    ):
        self.kernel = kernel
        self.program = program
        self.mesh = mesh
        self.scheduler = scheduler
        self.report = report
        self.limits = limits
        self.timelines = clocks.Timelines()
        self.detector = RaceDetector(report, detect_races)
        self.cost = Clock(cost, self)
        self.trace = trace
        self.has_start_barrier = has_start_barrier
        self.mail = mail or Mail()
        self.mail.launches += 1
        self.places: dict[int, int] = {}
        self.devices = [Device(i, mesh) for i in range(mesh.num_devices)]
        for device in self.devices:
            device.start = self.timelines.new()
        self.checks = Checks(self, check_hardware)
        self.tasks: list[Task] = []
        self.pending_loads: list[Any] = []
        self.tensor_cores: list[TensorCores] = []
        self._shape = list(kernel.mesh.shape.items())
        if kernel.mesh.num_threads:
            self._shape = self._shape[:-1]

    @property
    def num_warpgroups(self) -> int:
        """Warpgroups of a block."""
        return self.kernel.mesh.num_threads or 1

    @property
    def has_clusters(self) -> bool:
        """Whether blocks can reach each other's shared memory."""
        return math.prod(self.kernel.mesh.cluster or ()) > 1

    def add_blocks(self) -> None:
        """Makes the blocks of the grid on every device, and starts those that are resident."""
        names = [name for name, _ in self._shape]
        cluster = math.prod(self.kernel.mesh.cluster)
        for device in self.devices:
            grid = itertools.product(*(range(n) for _, n in self._shape))
            for index, position in enumerate(grid):
                block = Block(device, index, dict(zip(names, position, strict=True)))
                block.barrier = BarrierArray(
                    "the entry of a shared scope", (), self.num_warpgroups, self.scheduler, None
                ).items[0]
                block.registers = Registers(self.num_warpgroups)
                device.blocks.append(block)
                device.waiting_blocks.append(block)
            if device.blocks and self.limits.resident_blocks < cluster:
                raise ValueError(
                    f"resident_blocks={self.limits.resident_blocks} is less than a cluster of"
                    f" {cluster} blocks; raise it."
                )
        for device in self.devices:
            self._start_blocks(device, cluster)

    def _start_blocks(self, device: Device, cluster: int) -> None:
        while device.waiting_blocks and device.resident + cluster <= self.limits.resident_blocks:
            for _ in range(cluster):
                block = device.waiting_blocks.popleft()
                device.resident += 1
                block.running = self.num_warpgroups
                for warpgroup in range(self.num_warpgroups):
                    task = Task(self, block, warpgroup)
                    task.acquire_one(device.start, 1)
                    task.time = device.time
                    task.body = self.program.run(task, self._arguments(device))
                    self.tasks.append(task)
                    self.scheduler.push(task)

    def claim_cluster(self, device: Device) -> Block | None:
        """Takes the next cluster that has not started out of the queue; its first block, if any."""
        if not device.waiting_blocks:
            return None
        size = math.prod(self.kernel.mesh.cluster)
        first, *_ = [device.waiting_blocks.popleft() for _ in range(size)]
        return first

    def _arguments(self, device: Device) -> list[Any]:
        return list(device.buffers)

    def task_finished(self, task: Task) -> None:
        """A task's body has ended: settles what it leaves, and lets the next block in."""
        if task.warp is not None:
            return
        block, device = task.block, task.device
        for copy in task.open_copies():
            self.checks.unawaited_copy(copy)
        block.clock = clocks.join(block.clock, task.clock)
        block.time = max(block.time, task.time)
        block.running -= 1
        if block.running:
            return
        device.clock = clocks.join(device.clock, block.clock)
        device.time = max(device.time, block.time) if not device.waiting_blocks else block.time
        device.resident -= 1
        self._start_blocks(device, math.prod(self.kernel.mesh.cluster))

    # Where a ref points to on another device or block.

    def on_device(self, ref: Any, device: int) -> Any:
        """The allocation of `device` that is symmetric to `ref`."""
        if not 0 <= device < len(self.devices):
            raise ValueError(
                f"device id {device} is not in the mesh of {len(self.devices)} devices."
            )
        target = self.devices[device]
        if isinstance(ref, SemaphoreArray):
            shape = ref.ids.data.shape
            return self.semaphores(target, ref.key, ref.name, shape, ref.persistent, ref.early)
        if isinstance(ref, Buffer) and ref.space == "gmem":
            return target.buffers[ref.key]
        raise ValueError("only operands, results and semaphores in global memory can be remote.")

    def semaphores(
        self,
        device: Device,
        key: Hashable,
        name: str,
        shape: tuple[int, ...],
        persistent: bool = False,
        early: bool = False,
    ) -> SemaphoreArray:
        """The semaphores of `device` called `key`; made, at zero, at its first use."""
        found = device.semaphores.get(key)
        if found is None:
            found = SemaphoreArray(
                name, shape, device.index, self.scheduler, key, persistent, early
            )
            device.semaphores[key] = found
        return found

    def in_cluster(self, task: Task, ref: Any, where: dict[Hashable, int]) -> Any:
        """The allocation symmetric to `ref` in another block of the task's cluster."""
        block = self.cluster_block(task.block, where)
        for there in (block.shared, block.left):
            if ref.key in there:
                return there[ref.key]
        return self.allocate(block, ref)

    def cluster_block(self, block: Block, where: dict[Hashable, int]) -> Block:
        """The block of the same cluster whose index along some cluster axes is as given."""
        coords = {**block.coords, **{k: int(v) for k, v in where.items()}}
        index = 0
        for name, size in self._shape:
            index = index * size + coords[name]
        return block.device.blocks[index]

    def cluster_blocks(self, block: Block, axes: tuple) -> list[Block]:
        """All blocks of the same cluster along `axes`, in order."""
        names = [a for axis in axes for a in (axis if isinstance(axis, tuple) else (axis,))]
        sizes = dict(self._shape)
        ranges = [range(sizes[n]) for n in names]
        return [
            self.cluster_block(block, dict(zip(names, position, strict=True)))
            for position in itertools.product(*ranges)
        ]

    def cluster_neighbours(self, block: Block, axes: tuple) -> list[Block]:
        """The blocks of the same cluster that differ from `block` along at most one of `axes`.

        Those are the blocks that an arrival at a cluster barrier reaches. A tuple among the axes
        counts as one, so along `(("x", "y"),)` they are all blocks of a cluster over x and y, but
        along `("x", "y")` only a row and a column.
        """
        blocks = [b for axis in axes for b in self.cluster_blocks(block, (axis,))]
        return list(dict.fromkeys(blocks))

    def allocate(self, block: Block, ref: Any) -> Any:
        """What a block that has not entered the scope yet will find there."""
        made = like(self, block, ref)
        self.add_shared(block, ref.key, made)
        return made

    def add_shared(self, block: Block, key: Hashable, made: Any) -> None:
        """Gives `block` a shared allocation."""
        if isinstance(made, Buffer):
            inherit(self.detector, block.freed, made)
        block.shared[key] = made
        block.shared_bytes += shared_bytes(made)
        statistics = self.report.statistics
        statistics.peak_shared_bytes = max(statistics.peak_shared_bytes, block.shared_bytes)

    # Reports.

    def touch(self, device: int, access: Access) -> None:
        """Remembers an access from another device, to compare with the end of `device`."""
        if access.device == device:
            return
        target = self.devices[device]
        target.remote_touches[access.timeline] = access
        if not self.has_start_barrier and not clocks.knows(access.clock, target.start, 1):
            self.checks.before_start(target, access)

    def touch_shared(self, buffer: Buffer, access: Access, block: Block) -> None:
        """Remembers an access of `block` to shared memory, to compare with its owner's end."""
        if buffer.block is not None and buffer.block != block.index:
            owner = self.devices[buffer.device].blocks[buffer.block]
            owner.remote_touches[access.timeline] = access

    def count_copy(self, source: int, destination: int, num_bytes: int) -> None:
        """Counts a bulk copy of `num_bytes`."""
        self.report.statistics.copy_bytes += num_bytes
        self.count_link(source, destination, num_bytes)

    def count_link(self, source: int, destination: int, num_bytes: int) -> None:
        """Counts bytes that go from one device to another."""
        if source != destination:
            self.report.statistics.link_bytes[source, destination] += num_bytes

    def now(self, who: Any) -> float:
        """The time of `who`, by the cost model or in steps, for `note`."""
        if self.trace is None:
            return 0.0
        return who.time if self.trace.is_timed else float(self.scheduler.steps)

    def note(self, who: Any, what: str, begin: float) -> None:
        """Adds to the trace, if one is kept, what `who` (a task or a copy) did since `begin`."""
        if self.trace is not None:
            device, row = who.place()
            self.trace.add(device, row, what, begin, self.now(who))

    def print(self, task: Task, text: str) -> None:
        """A line that the kernel prints."""
        self.report.output.append(text)
        print(f"{task.describe()}: {text}")
