"""Checks beside data races: copies, barriers, and what is left at the end."""

from __future__ import annotations

from typing import Any

from stretto.distributed.simulator.reports.report import Finding
from stretto.distributed.simulator.semaphore_checks import SemaphoreChecks
from stretto.distributed.simulator.state.alignment import misalignments
from stretto.distributed.simulator.state.clocks import Clock, knows
from stretto.distributed.simulator.state.engine import Taken
from stretto.distributed.simulator.state.mail import Message
from stretto.distributed.simulator.state.memory import Buffer, Region
from stretto.distributed.simulator.state.races import Access
from stretto.distributed.sites import Site


class Checks(SemaphoreChecks):
    """The checks of one launch."""

    def committed(self, region: Region, access: Access, committed: Clock) -> None:
        """Checks what a copy or a tensor core operation that is being issued comes after.

        Copies and tensor cores take another path to shared memory than loads and stores. What a
        barrier puts in order on one path may still overtake on the other, unless `commit_smem` has
        come between: in the task that loaded or stored, or in one ordered after it. What nothing
        orders at all is a race, and found by the access itself.

        Args:
          region: what the operation touches.
          access: how; its clock is that of the issue.
          committed: what the issuing task knows to have been committed.
        """
        if not self._on:
            return
        detector = self._machine.detector
        overwrites = access.what == "copy's write"
        for last in detector.last_writes(region):
            if last.gone and not overwrites:
                continue  # What was never written in this scope is told as that.
            for store in (last, *last.earlier):
                if _overtakes(store, access, committed):
                    self._uncommitted("store", store, access, region)
        for load in detector.reads_since(region) if overwrites else ():
            if _overtakes(load, access, committed):
                self._uncommitted("load", load, access, region)

    def _uncommitted(self, what: str, earlier: Access, access: Access, region: Region) -> None:
        story = {
            "store": "may not see the store, or come before it",
            "load": "may come before the load; H100s keep the order, PTX does not promise it",
        }
        kind = f"uncommitted {what}"
        self._report.add(
            Finding(
                kind=kind,
                key=(kind, earlier.site, access.site, access.what, region.buffer.name),
                message=(
                    f"race on {region.describe()}:\n"
                    f"  {earlier.describe()}\n"
                    f"  {access.describe()}\n"
                    f"  No commit_smem() is between them, so the second {story[what]}. Call it"
                    f" after the {what}, in its warpgroup or in one that waits for that."
                ),
                sites=(earlier.site, access.site),
                is_warning=what == "load",
            )
        )

    def aligned(self, copy: Any, shared: Region, window: Region, *, may_be_flat: bool) -> None:
        """Checks where a copy between shared and global memory begins (`alignment`)."""
        if not self.of_hardware:
            return
        for what in misalignments(shared, window, may_be_flat=may_be_flat):
            self._find(
                "misaligned copy",
                f"{copy.describe()} at {copy.site}: {what}. Take offsets that are, or buffers whose"
                " rows are that long.",
                copy.site,
            )

    def uneven_waits(self, barrier: Any, counts: list[int], task: Any, site: Site) -> None:
        """A warpgroup waits on a barrier for which its warps are at different phases."""
        self._find(
            "uneven waits",
            f"{task.describe()} waits on barrier {barrier.name} at {site}, on which its warps have"
            f" waited {', '.join(map(str, counts))} times so far. Each warp keeps its own phase of"
            " a barrier, so some of them wait for another phase than the others, and go on too"
            " early or not at all. Have all warps wait as often as each other, or give the"
            " one that waits alone a barrier of its own.",
            site,
            name=barrier.name,
        )

    def arrival_at_ended_block(self, name: str, block: Any, task: Any, site: Site) -> None:
        """A task arrives at a barrier of a block that has ended."""
        self._find(
            "ended block",
            f"{task.describe()} arrives at barrier {name} at {site}, in block {block.index} of its"
            " cluster too, which has ended: its shared memory is gone. Let that block wait for the"
            " arrival before it ends.",
            site,
            name=name,
        )

    def stray(self, copy: Any, taken: Taken) -> None:
        """A copy takes more than the window that it is given, or something else."""
        if not taken.stray:
            return
        buffer = taken.region.buffer
        if not taken.region.get().size:
            self._find(
                "stray copy",
                f"a copy to {buffer.describe()}, shape {buffer.data.shape}, issued by"
                f" {copy.issuer.describe()} at {copy.site} has no element inside: {taken.why}. Is"
                " an offset or a count wrong?",
                copy.site,
            )
        else:
            self._find(
                "stray copy",
                f"{copy.describe()} at {copy.site} takes {taken.stray} elements outside of its"
                f" window, in {taken.region.describe()}: {taken.why}. Take windows of which a whole"
                " number fits into the array.",
                copy.site,
            )

    def unawaited_copy(self, copy: Any) -> None:
        """A task has ended and never waited for `copy`."""
        self._find(
            "unawaited copy",
            f"{copy.describe()} at {copy.site} is never waited for: its shared memory may go away"
            " under it. End with wait_smem_to_gmem(0).",
            copy.site,
        )

    def operand_written(self, operand: Buffer) -> None:
        """A kernel has ended and has written to `operand`, if it has."""
        for access in self._machine.detector.last_writes(Region(operand, (), ...)):
            self._find(
                "operand written",
                f"{access.describe()} changes {operand.describe()}, an operand. XLA takes operands"
                " for unchanged, and the program and its caller may read them later. Write to a"
                " result, or to a buffer of `symmetric`.",
                access.site,
                name=operand.name,
            )

    def before_start(self, device: Any, access: Access) -> None:
        """A launch without a barrier at its start touches a peer that may not have started."""
        self._find(
            "before start",
            f"{access.describe()} touches memory of {device.describe()}, which may not have started"
            " yet: the kernel skips the barrier before it (skip_device_barrier), and nothing that"
            " this device has waited for says that the peer is there. In a body of `kernel.launch`,"
            " call handshake.wait() before any access to a peer.",
            access.site,
            name=access.what,
        )

    def at_end(self) -> None:
        """Checks made once everything has run."""
        machine = self._machine
        ends = [d.clock for d in machine.devices]
        if self._on:
            for device in machine.devices:
                for operand in device.operands:
                    self.operand_written(operand)
                for access in device.remote_touches.values():
                    self._after_end(device, access)
                for block in device.blocks:
                    for access in block.remote_touches.values():
                        self._after_blocks_end(block, access)
            for copy in machine.pending_loads:
                if not any(knows(end, *copy.writing) for end in ends):
                    self._find(
                        "unawaited copy",
                        f"{copy.describe()} at {copy.site} is never waited for: nobody waits for"
                        " its barrier.",
                        copy.site,
                    )
            for last in (t.last for t in machine.tensor_cores if t.last is not None):
                if not any(knows(end, last.timeline, last.value) for end in ends):
                    self._find(
                        "unawaited copy",
                        f"{last.describe()} at {last.site} is never waited for: its memory may go"
                        " away under it. End with a wait on the barrier of a commit that is after.",
                        last.site,
                    )
        for device in machine.devices:
            for array in device.semaphores.values():
                for semaphore in array.items:
                    # One that is only ever compared counts up by design.
                    if semaphore.value and (semaphore.persistent or semaphore.uses != {False}):
                        self.left_over(semaphore)

    def _after_end(self, device: Any, access: Access) -> None:
        if knows(device.clock, access.timeline, access.value):
            return
        self._find(
            "after end",
            f"{access.describe()} touches memory of {device.describe()}, which may have ended"
            " by then and given the memory away: nothing that it waits for comes after. Every"
            " kernel needs a closing synchronisation.",
            access.site,
            name=access.what,
        )

    def _after_blocks_end(self, block: Any, access: Access) -> None:
        if knows(block.clock, access.timeline, access.value):
            return
        self._find(
            "after end",
            f"{access.describe()} touches shared memory of {block.describe()}, which may have ended"
            " by then: nothing that it waits for comes after. The blocks of a cluster have to meet"
            " at a plgpu.ClusterBarrier before they end.",
            access.site,
            name=access.what,
        )

    def message_overwritten(self, old: Message, access: Access, slot: int) -> None:
        """Checks that a message which another replaces has been received, for sure."""
        now = old.launch == self._machine.mail.launches
        if not self._on or (old.reads and not now):
            return
        if old.reads and all(read.before(access) for read in old.reads) and old.zeroed:
            return
        received = "may not have been received yet" if old.reads else "has not been received"
        if not old.zeroed:
            received = "may not have been zeroed yet: its reader sends on without a fence"
        self._find(
            "message overwritten",
            f"{access.describe()} replaces the message that GPU {slot} had of flag {old.flag}, sent"
            f" by {old.written.describe()}, which {received}. A turn's messages go where those of"
            " the turn before the last were: receive all of a turn before the next is sent.",
            access.site,
            old.written.site,
        )


def _overtakes(earlier: Access, access: Access, committed: Clock) -> bool:
    """Whether `access`, by a copy or tensor cores, is ordered after `earlier` by barriers alone."""
    if earlier.is_async or not earlier.before(access):
        return False
    return not knows(committed, earlier.timeline, earlier.value)
