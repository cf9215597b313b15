"""Tasks: a warpgroup (or a warp) of a block of a device, running the kernel's jaxpr."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Hashable
from typing import Any

from stretto.distributed.simulator.state import clocks
from stretto.distributed.simulator.state.allocations import shared_bytes
from stretto.distributed.simulator.state.barriers import PhaseEnd
from stretto.distributed.simulator.state.freed import give_back
from stretto.distributed.simulator.state.memory import Buffer
from stretto.distributed.simulator.state.races import Access
from stretto.distributed.simulator.state.waiting import RecentWaits
from stretto.distributed.sites import Site


class Warp:
    """What the hardware keeps for each warp by itself.

    Attributes:
      phases: for each barrier, how often the warp has waited on it.
      groups: committed groups of copies out of shared memory, oldest first.
      read_awaited: how many of these, from the oldest, are known to have read their source.
      uncommitted: such copies that no group holds yet.
      tensor_cores: what they have been given to do by it, if anything (`tensor_cores`).
    """

    __slots__ = ("groups", "phases", "read_awaited", "tensor_cores", "uncommitted")

    def __init__(self, phases: dict[Any, int] | None = None):
        self.phases: dict[Any, int] = dict(phases or {})
        self.groups: list[list[Any]] = []
        self.read_awaited = 0
        self.uncommitted: list[Any] = []
        self.tensor_cores: Any = None

    def commit_group(self) -> None:
        """Puts the copies that no group holds yet into one."""
        self.groups.append(self.uncommitted)
        self.uncommitted = []


class Task:
    """One thread in Pallas' sense: a warpgroup, or a warp of one under `core_map`.

    Attributes:
      machine, device, block: where it runs.
      warpgroup, warp: which of its block; `warp` is None for a whole warpgroup.
      body: the generator that runs it.
      timeline: its own; `clock` is what it knows, and `committed` what of it, in shared memory,
        copies and tensor cores can see.
      tensor: what of it is in order for tensor cores, and for loads and stores of tensor memory:
        what it has waited for itself, and what barriers that order tensor cores have brought.
      warps: its own warp, or those of its warpgroup; as long as a warpgroup's have always gone
        together, one stands for all of them. The first issues its copies.
      matmuls: (timeline, value) of each tensor core operation of Hopper that may still run.
      tensor_loads, tensor_stores: likewise, of each load from and store to tensor memory.
      waits: its last waits for semaphores.
      scopes: how many shared allocations it has entered.
      tops: how much its open scopes hold of each kind of thing that they take in turn.
      time: by the cost model.
      polled: it has just looked at a value without waiting, so others should run.
      priority: what the scheduler's order keeps of it.
    """

    __slots__ = (
        "asyncs", "block", "body", "clock", "committed", "device", "machine", "matmuls", "polled",
        "priority", "scopes", "tensor", "tensor_loads", "tensor_stores", "time", "timeline", "tops",
        "waiting", "waits", "warp", "warpgroup", "warps",
    )  # fmt: skip

    def __init__(self, machine: Any, block: Any, warpgroup: int, warp: int | None = None):
        self.machine = machine
        self.block = block
        self.device = block.device
        self.warpgroup = warpgroup
        self.warp = warp
        self.timeline = machine.timelines.new()
        self.asyncs = clocks.AsyncTimelines(machine.timelines)
        self.clock = clocks.advance(clocks.empty(), self.timeline, 1)
        self.committed = clocks.empty()
        self.tensor = clocks.empty()
        self.tensor_loads: list[tuple[int, int]] = []
        self.tensor_stores: list[tuple[int, int]] = []
        self.warps = [Warp()]
        self.matmuls: list[tuple[int, int]] = []
        self.waits = RecentWaits()
        self.scopes = 0
        self.tops: Counter[Any] = Counter()
        self.waiting: Any = None
        self.time = 0.0
        self.polled = False
        self.priority: float | None = None
        self.body: Generator[Any, None, Any]

    def split_warps(self, count: int) -> list[Warp]:
        """Its `count` warps, each for itself from now on."""
        first = self.warps[0]
        while len(self.warps) < count:
            self.warps.append(Warp(first.phases))
        return self.warps

    def waits_on(self, barrier: Any) -> list[int]:
        """How often each of its warps has waited on `barrier`."""
        return [warp.phases.get(barrier, 0) for warp in self.warps]

    def waits_of_warps(self) -> list[dict[Any, int]]:
        """How often each warp has waited on each barrier, as it is now."""
        return [warp.phases.copy() for warp in self.warps]

    def count_wait(self, barrier: Any) -> None:
        """Each of its warps waits on `barrier` once more."""
        for warp in self.warps:
            warp.phases[barrier] = warp.phases.get(barrier, 0) + 1

    def open_copies(self) -> list[Any]:
        """Copies out of shared memory whose reads nobody has waited for."""
        return [
            copy
            for warp in self.warps
            for group in (*warp.groups[warp.read_awaited :], warp.uncommitted)
            for copy in group
        ]

    def axis_index(self, name: Hashable) -> int:
        """The task's index along an axis of the kernel's mesh or of the device mesh."""
        index = self.block.axis_index(name)
        if index is not None:
            return index
        mesh = self.machine.kernel.mesh
        if name == mesh.thread_name:
            return self.warpgroup
        if name in self.device.coords:
            return self.device.coords[name]
        if self.warp is not None:
            return self.warp
        raise KeyError(f"axis_index of {name!r}, which is no axis here")

    def release(self) -> clocks.Clock:
        """What the task knows, to be given away; what it does from now on is not part of it."""
        clock = self.clock.copy()
        self.clock[self.timeline] += 1
        return clock

    def acquire(
        self,
        clock: clocks.Clock,
        committed: clocks.Clock | None = None,
        tensor: clocks.Clock | None = None,
    ) -> None:
        """Takes over what others knew, and had made visible to copies and tensor cores."""
        self.clock = clocks.join(self.clock, clock)
        if committed is not None:
            self.committed = clocks.join(self.committed, committed)
        if tensor is not None:
            self.tensor = clocks.join(self.tensor, tensor)

    def pass_barrier(self, over: PhaseEnd) -> None:
        """Takes over what the end of a barrier's phase gives."""
        self.acquire(over.clock, over.committed, over.tensor)
        self.time = max(self.time, over.time)

    def commit(self) -> None:
        """Makes all that it knows visible to copies and tensor cores."""
        self.committed = clocks.join(self.committed, self.release())

    def acquire_one(self, timeline: int, value: int) -> None:
        """Takes over that one operation is done."""
        self.clock = clocks.advance(self.clock, timeline, value)

    def access(self, what: str, site: Site, atomic: str | None = None) -> Access:
        """An access to memory that the task does now."""
        return Access(
            what,
            self,
            site,
            self.device.index,
            self.clock,
            self.timeline,
            int(self.clock[self.timeline]),
            atomic,
        )

    def finish(self) -> None:
        """Called once, when the body has ended."""
        self.machine.task_finished(self)

    def place(self) -> tuple[int, str]:
        """Its device and its row in a trace."""
        return self.device.index, self.describe()

    def describe(self) -> str:
        """The task in words."""
        text = self.block.describe()
        if self.machine.kernel.mesh.num_threads:
            text += f" warpgroup {self.warpgroup}"
        return text if self.warp is None else f"{text} warp {self.warp}"


class Block:
    """One block of the grid on one device.

    Attributes:
      device: where it runs.
      index: linear, row-major over the grid and then the cluster.
      coords: index along each axis of the grid and of the cluster.
      shared: shared allocations, by the number of the scope and the position in it.
      freed: buffers of scopes that it has left, whose memory later scopes may get.
      left: those of scopes that it has left, where another block of its cluster may still look.
      remote_touches: the last access of each timeline of another block to its shared memory.
      barrier: what its warpgroups meet at when they enter a shared scope.
      shared_bytes: shared memory that it holds now.
      scope_exits: how many of its warpgroups have left each shared scope.
      registers: those of its warpgroups' threads.
      running: tasks not done.
      clock: what all its finished tasks knew.
      time: when its last finished task ended, by the cost model.
      tensor_free: when its tensor cores are free.
    """

    __slots__ = (
        "barrier", "clock", "coords", "device", "freed", "index", "left", "registers",
        "remote_touches", "running", "scope_exits", "shared", "shared_bytes", "tensor_free", "time",
    )  # fmt: skip

    def __init__(self, device: Any, index: int, coords: dict[Hashable, int]):
        self.device = device
        self.freed: list[Buffer] = []
        self.left: dict[Any, Any] = {}
        self.remote_touches: dict[int, Access] = {}
        self.index = index
        self.coords = coords
        self.shared: dict[Any, Any] = {}
        self.barrier: Any = None
        self.shared_bytes = 0
        self.scope_exits: dict[int, int] = {}
        self.registers: Any = None
        self.running = 0
        self.clock = clocks.empty()
        self.time = 0.0
        self.tensor_free = 0.0

    def leave_scope(self, number: int, num_warpgroups: int, *, in_cluster: bool) -> None:
        """A warpgroup leaves the shared scope `number`; the last one gives its memory back."""
        self.scope_exits[number] = self.scope_exits.get(number, 0) + 1
        if self.scope_exits[number] < num_warpgroups:
            return
        for key in [k for k in self.shared if k[0] == number]:
            gone = self.shared.pop(key)
            self.shared_bytes -= shared_bytes(gone)
            give_back(self.freed, gone)
            if in_cluster:
                self.left[key] = gone

    @property
    def has_tensor_memory(self) -> bool:
        """Whether it ends with all of its cluster: Mosaic GPU waits before it frees such memory."""
        held = (*self.shared.values(), *self.left.values())
        return any(getattr(one, "space", None) == "tmem" for one in held)

    def axis_index(self, name: Hashable) -> int | None:
        """The block's index along an axis of the kernel's mesh; None if it is not one of its."""
        return self.coords.get(name)

    def describe(self) -> str:
        """The block in words."""
        return f"{self.device.describe()} block {self.index}"
