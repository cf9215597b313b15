"""How the devices of a team start a kernel together, and end it together.

A kernel accesses its peers' memory. It must not do so before a peer has started the same launch
(then the peer's operands are ready, its results are free and its semaphores zero), and it must not
end before its peers have finished with its memory. XLA guarantees the first by a barrier kernel
before each such kernel. That takes 4 to 8 us on the device, and as long again on the host. Here the
kernel itself does so, during its own first steps. The names are those of a barrier: arrive, wait.

| counter of the heap | raised by | waited for by | count | proves |
|---|---|---|---|---|
| `opening[s]` | block 0 of `s`: `arrive` | callers of `wait` | 1 | that device has started |
| `observed` | callers of `wait` | block 0: `forget_start` | all | nobody reads `opening` any more |
| `closing[s]` | its blocks: `arrive_at_end` | block 0: `wait_at_end` | all of them | it has ended |

`s` is a device's slot in the heap. Counters of the heap are not zeroed before a launch: each launch
subtracts what it has waited for. A peer may be ahead by one launch. It then raises `opening` again,
which this device must see once for each launch, at any time: so this device subtracts 1, and sets
nothing to 0. The peer cannot be ahead by two, since it does not end the next launch without this
device. Each pair of devices has its own counters (slots number devices independently of teams),
and all devices start all launches in the same order; so a pair's counters serve all its teams.

Blocks that wait occupy their multiprocessors. So a kernel that fills the device does not start by
counters, unless most of its blocks end without their peers' (see `kernel.launch`). Nor does any
without a heap (`STRETTO_HEAP=0`), where `closing` is the kernel's semaphore. XLA's barrier is kept.
"""

from __future__ import annotations

import dataclasses

import jax
from jax.experimental import pallas as pl

from stretto.distributed import semaphores
from stretto.distributed.memory import heap
from stretto.distributed.semaphores import Semaphore, SemaphoreArray
from stretto.distributed.team import Team

_OPENING = SemaphoreArray((heap.MAX_SLOTS,), heap_word=0)
_CLOSING = SemaphoreArray((heap.MAX_SLOTS,), heap_word=heap.MAX_SLOTS)
_OBSERVED = SemaphoreArray((), heap_word=2 * heap.MAX_SLOTS, local=True)
_CLOSING_WITHOUT_HEAP = SemaphoreArray((heap.MAX_SLOTS,))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Handshake:
    """The barriers at both ends of one launch, inside its kernel.

    Attributes:
      team: whose devices they are.
      block, num_blocks: the block that runs this, and the number of blocks.
      parties: the number of calls of `wait` on a device.
      opening, observed: counters of the heap; None where XLA's barrier replaces them.
      closing: see above; None in a kernel that closes in its own way.
    """

    team: Team
    block: jax.Array
    num_blocks: int
    parties: int
    opening: Semaphore | None
    observed: Semaphore | None
    closing: Semaphore | None

    def arrive_and_wait(self) -> None:
        """`arrive` in block 0, and `wait`; for one warp of each block."""
        pl.when(self.block == 0)(self.arrive)
        self.wait()

    def arrive(self) -> None:
        """Signals the peers that this device has started. Called once, in block 0.

        It orders nothing that this kernel did before: that takes a signal.
        """
        if self.opening is not None:
            own = self.team.slot(self.team.device_id())
            for peer in self._peers():
                self.opening.at[own].signal(peer_id=peer)

    def wait(self) -> None:
        """Returns once all peers have started; called by `parties` warps or warpgroups.

        Only what they do afterwards may touch a peer's memory. Others that wait for a peer's signal
        have to call it as well: only this wait has the limit for peers that start late.
        """
        if self.opening is None or self.observed is None:
            return
        for peer in self._peers():
            self.opening.at[self.team.slot(peer)].wait()
        self.observed.signal()

    def arrive_at_end(self) -> None:
        """Signals the peers that this block has finished with their memory; once by each block.

        Raises:
          ValueError: in a body with `waiting_warps`, which closes in its own way.
        """
        if self.closing is None:
            raise ValueError(
                "handshake.arrive_at_end() is for kernels that kernel.launch closes; with"
                " waiting_warps signal a semaphore of the kernel's own."
            )
        own = self.team.slot(self.team.device_id())
        for peer in self._peers():
            self.closing.at[own].signal(peer_id=peer)

    def wait_at_end(self) -> None:
        """Called once, in block 0; returns once all peers have done, if this kernel closes so.

        The kernel may only end once no peer uses this device's memory, by this or in its own way.
        """
        self.forget_start()
        if self.closing is not None:
            for peer in self._peers():
                self.closing.at[self.team.slot(peer)].wait(self.num_blocks, decrement=True)

    def forget_start(self) -> None:
        """Called once, in block 0: lowers what was raised at the start.

        `wait_at_end` does this. In a kernel that closes in its own way block 0 may do it before it
        waits for its peers, in place of `wait_at_end`: it takes some microseconds.
        """
        if self.opening is not None and self.observed is not None:
            self.observed.wait(self.parties, decrement=True)
            for peer in self._peers():
                self.opening.at[self.team.slot(peer)].wait(decrement=True)

    def _peers(self) -> list[jax.Array]:
        return [self.team.neighbour(offset) for offset in self.team.peer_offsets]


def make(
    kernel: str,
    team: Team,
    block: jax.Array,
    *,
    num_blocks: int,
    parties: int,
    opens: bool,
    closes: bool,
) -> Handshake:
    """The handshake of a launch of `kernel`; to be called once, first in its body.

    `opens` is False where XLA's barrier comes before the kernel, `closes` for a body that itself
    makes sure, before block 0 calls `wait_at_end`, that no peer still uses this device's memory.
    """
    together = not team.is_alone
    shared = opens and together
    ends = _CLOSING if together and heap.is_wanted() else _CLOSING_WITHOUT_HEAP

    def allocate(name: str, spec: SemaphoreArray, when: bool, **options: bool) -> Semaphore | None:
        return semaphores.allocate(name, spec, kernel, team, **options) if when else None

    return Handshake(
        team=team,
        block=block,
        num_blocks=num_blocks,
        parties=parties,
        opening=allocate("opening", _OPENING, shared, awaits_start=True),
        observed=allocate("observed", _OBSERVED, shared),
        closing=allocate("closing", ends, closes),
    )
