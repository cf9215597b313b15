"""How the devices of a team begin a kernel together, and end it together.

A kernel touches memory of its peers, so it must not begin to before a peer has come to the same
launch (its operands are ready then, its results are its own and its semaphores zero), and must not
end before its peers have done with what is its. XLA sees to the first by a barrier, a kernel of its
own before each of ours, which costs 4 to 8 us on the device and as much again on the host. Here the
kernel does it, under its own first steps.

| counter of the heap | raised by | waited for by | count | proves |
|---|---|---|---|---|
| `opening[s]` | block 0 of device `s` | whoever `meet`s | 1 | that device has come |
| `met` | whoever `meet`s | block 0, at the end | all of them | nobody looks at `opening` any more |
| `closing[s]` | every block of device `s` | block 0, at the end | its blocks | it has done |

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
_MET = SemaphoreArray((), heap_word=2 * heap.MAX_SLOTS, local=True)
_CLOSING_WITHOUT_HEAP = SemaphoreArray((heap.MAX_SLOTS,))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Handshake:
    """The meeting of one launch, inside its kernel.

    Attributes:
      team: who meets.
      block, num_blocks: the block that runs this, and how many there are.
      parties: how many call `meet` on a device.
      opening, met: counters of the heap; None where XLA's barrier stands in for them.
      closing: see above; None in a kernel that closes in its own way.
    """

    team: Team
    block: jax.Array
    num_blocks: int
    parties: int
    opening: Semaphore | None
    met: Semaphore | None
    closing: Semaphore | None

    def begin(self) -> None:
        """`come` in block 0, and `meet`; for one warp of each block."""
        pl.when(self.block == 0)(self.come)
        self.meet()

    def come(self) -> None:
        """Tells the peers that this device is here. Called once, in block 0.

        It says nothing of what this device has made before: that takes a signal.
        """
        if self.opening is not None:
            own = self.team.slot(self.team.device_id())
            for peer in self._peers():
                self.opening.at[own].signal(peer_id=peer)

    def meet(self) -> None:
        """Returns once all peers are here; called by `parties` warps or warpgroups.

        Only what they do afterwards may touch a peer's memory. Others that wait for a peer's signal
        have to meet as well: only this wait has the limit for peers that start late.
        """
        if self.opening is None or self.met is None:
            return
        for peer in self._peers():
            self.opening.at[self.team.slot(peer)].wait()
        self.met.signal()

    def done(self) -> None:
        """Tells the peers that this block has done with their memory; called once by each block.

        Raises:
          ValueError: in a body with `warps_that_meet`, which closes in its own way.
        """
        if self.closing is None:
            raise ValueError(
                "handshake.done() is for kernels that kernel.launch closes; with warps_that_meet"
                " signal a semaphore of the kernel's own."
            )
        own = self.team.slot(self.team.device_id())
        for peer in self._peers():
            self.closing.at[own].signal(peer_id=peer)

    def part(self) -> None:
        """Called once, in block 0; returns once all peers are `done`, if this kernel closes so.

        The kernel may only end once no peer uses this device's memory, by this or in its own way.
        """
        if self.closing is not None:
            for peer in self._peers():
                self.closing.at[self.team.slot(peer)].wait(self.num_blocks, decrement=True)
        if self.opening is not None and self.met is not None:
            self.met.wait(self.parties, decrement=True)
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
    makes sure, before block 0 `part`s, that no peer still uses this device's memory.
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
        met=allocate("met", _MET, shared),
        closing=allocate("closing", _CLOSING if shared else _CLOSING_WITHOUT_HEAP, closes),
    )
