"""How the devices of a team begin a kernel together, and end it together.

A kernel touches memory of its peers. It must not begin to before a peer has started the same launch
(the peer's operands are ready then, its results are its own and its semaphores zero), and must not
end before its peers have done with its memory. XLA sees to the first by a barrier, a kernel of its
own before each of ours, which costs 4 to 8 us on the device and as much again on the host. Here the
kernel does it, under its own first steps. The words are those of a barrier: to arrive, to wait.

| counter of the heap | raised by | waited for by | count | proves |
|---|---|---|---|---|
| `opening[s]` | block 0 of `s`: `arrive` | who calls `wait` | 1 | that device has started |
| `observed` | who calls `wait` | block 0: `wait_at_end` | all | `opening` is not looked at |
| `closing[s]` | its blocks: `arrive_at_end` | block 0: `wait_at_end` | its blocks | it has done |

`s` is a device's slot in the heap. Counters of the heap are not zeroed before a launch: each launch
takes off what it has waited for. A peer may be ahead by one launch. It raises `opening` again then,
which this device needs to see once for each launch, and no matter when: so it takes 1 off, and sets
nothing to 0. It cannot be ahead by two, since it does not end the next launch without this device.
Counters are the pair's own (slots name devices, whatever the team calls them), and all devices come
to all launches in the same order; so a pair's counters are right whatever other teams they meet in.

Blocks that wait hold their multiprocessors. So a kernel that fills the device does not open itself
(`kernel.launch` tells why), nor does any without a heap (`STRETTO_HEAP=0`): XLA's barrier is left
in, and `closing` is a semaphore of the kernel.
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
      block, num_blocks: the block that runs this, and how many there are.
      parties: how many call `wait` on a device.
      opening, observed: counters of the heap; None where XLA's barrier stands in for them.
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
        """Tells the peers that this device has started. Called once, in block 0.

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
        """Tells the peers that this block has done with their memory; called once by each block.

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
        if self.closing is not None:
            for peer in self._peers():
                self.closing.at[self.team.slot(peer)].wait(self.num_blocks, decrement=True)
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
    shared = opens and not team.is_alone

    def allocate(name: str, spec: SemaphoreArray, when: bool, **options: bool) -> Semaphore | None:
        return semaphores.allocate(name, spec, kernel, team, **options) if when else None

    return Handshake(
        team=team,
        block=block,
        num_blocks=num_blocks,
        parties=parties,
        opening=allocate("opening", _OPENING, shared, awaits_start=True),
        observed=allocate("observed", _OBSERVED, shared),
        closing=allocate("closing", _CLOSING if shared else _CLOSING_WITHOUT_HEAP, closes),
    )
