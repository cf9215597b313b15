"""Kernels whose devices exchange messages through the heap alone: to XLA, kernels of one device.

XLA runs no barrier before such a kernel and hands it no table of addresses, and may record it in a
command buffer (`recording`): the heap never moves, and what tells one launch from the next lies in it.

Block `b` of a device exchanges messages with the blocks `b` of its peers, in turns. In a turn it
sends messages to each peer and receives as many from it. Turns of a pair of devices and a block are
counted on both sides, over all launches:

| in the heap of the receiver | written by | read by | proves |
|---|---|---|---|
| `turns[s, b]` | its block `b`, when it ends | the same, when it starts | so many turns with `s` are over |
| `mail[s, b, turn % 2]` | block `b` of `s`, each word beside a flag of the turn, or bare (`messages`) | its block `b`, which zeroes bare words | the word has come |

A half is written again two turns later. By then its reader is done with it: the writer has received
the reader's messages of the turn between, which the reader sent after it had read. That holds within
a launch and from one launch to the next, for any two kernels that two devices run in the same order.
So no kernel waits for its peers at its end. What a reader zeroes in a turn is zero before it sends in
the next one, by a fence, or by the end of the launch.
"""  # noqa: E501

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mosaic
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed import arguments, kernel, residency, settings
from stretto.distributed.by_name import by_name
from stretto.distributed.devices.axes import make_varying, varying_axes
from stretto.distributed.memory import heap
from stretto.distributed.memory.mailbox import Site
from stretto.distributed.primitives import (
    heap_words,
    message_receiving,
    message_sending,
    messages,
    slots,
    team_kernel,
)
from stretto.distributed.primitives.team_kernel import TeamKernelInfo
from stretto.distributed.team import Team


@by_name
def room(*, bare: bool) -> int:
    """Words that a block may send to each of its peers in a turn."""
    return heap.BARE_WORDS if bare else heap.FLAGGED_WORDS


@by_name
def obstacle(team_size: int, words: int, *, bare: bool = False) -> str | None:
    """Why a team cannot exchange messages of so many words in a turn, None if it can."""
    if not heap.is_wanted():
        return "it exchanges through the heap, which STRETTO_HEAP=0 forbids."
    if team_size > heap.MAX_SENDERS:
        return f"it exchanges among {heap.MAX_SENDERS} devices at most, not {team_size}."
    if words > room(bare=bare):
        return f"a message of {words} words is more than {room(bare=bare)}, a block's room."
    return None


def most_blocks() -> int:
    """Blocks of a kernel at most: its channels, and something else can run beside them."""
    return min(heap.CHANNELS, residency.most_blocks_beside_others())


@by_name
def words_of(elements: int, dtype: jax.typing.DTypeLike, *, bare: bool = False) -> int:
    """Words of the heap that a message takes, from which the next one follows.

    Raises:
      ValueError: the elements are not whole 8 bytes for each of 128 threads.
    """
    size = elements * jnp.dtype(dtype).itemsize
    if size % (8 * messages.THREADS):
        raise ValueError(
            f"a message of {elements} elements of {jnp.dtype(dtype)} must be a multiple of"
            f" {8 * messages.THREADS} bytes."
        )
    return messages.words_of_message(elements, dtype, bare=bare)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mail:
    """A block's exchange of messages with the same block of its peers.

    Attributes:
      team: whose devices they are.
      block: the block.
      own: this device's slot.
      turns: for each correspondent, in their order, the turns before this launch.
      site: names a wait in reports.
      in_order: the correspondents are all members in the team's order, this device among them, and
        not the peers alone, the nearest on the ring first.
      bare: messages are bare: of floating-point numbers, whose words need no flags.
    """

    team: Team
    block: jax.Array
    own: jax.Array
    turns: Sequence[jax.Array]
    site: Site
    in_order: bool = False
    bare: bool = False

    @classmethod
    def open(
        cls, team: Team, place: jax.Array, block: jax.Array, name: str, **options: bool
    ) -> Mail:
        """The exchange of `block`, on the device of `place` (`slots.place`)."""
        site = Site(
            kernel=name, semaphore="mail", limit_s=settings.start_limit_s(), awaits_start=True
        )
        own = slots.slot_of_place(place.astype(jnp.int32))
        mail = cls(team=team, block=block, own=own, turns=(), site=site, **options)
        turns = [heap_words.read_word(own, mail._count(slot)) for _, slot in mail._others()]
        return dataclasses.replace(mail, turns=turns)

    def member(self) -> jax.Array:
        """Which member of the team this device is."""
        return slots.member(self.own, self.team.axes)

    def send(self, x: jax.Array, turn: int | jax.Array, word: int | jax.Array = 0) -> None:
        """Sends `x` to all correspondents in a turn of this launch, to `word` of their halves.

        Turns count from 0; all messages of one are received before the next one's are sent.
        """
        if self.bare:
            message_sending.fence_between_turns(turn)
        for (_, slot), turns in zip(self._others(), self.turns, strict=True):
            flag, at = self._of_turn(turns, turn, self.own)
            message_sending.post(x, slot, at + word, flag, bare=self.bare)

    def receive(
        self,
        shape: tuple[int, ...],
        dtype: jax.typing.DTypeLike,
        turn: int | jax.Array,
        word: int | jax.Array = 0,
    ) -> list[tuple[Any, jax.Array]]:
        """(member, its message) of each correspondent, sent in the same turn to the same word."""
        found = []
        for (member, slot), turns in zip(self._others(), self.turns, strict=True):
            found.append((member, self._receive(slot, turns, shape, dtype, turn, word)))
        return found

    def receive_from(
        self,
        member: jax.Array,
        shape: tuple[int, ...],
        dtype: jax.typing.DTypeLike,
        turn: int | jax.Array,
        word: int | jax.Array = 0,
    ) -> jax.Array:
        """The message of one member, of a mail that is `in_order`.

        In a loop over members one message at a time is in registers. A Python loop leaves the
        compiler to keep all of them there.
        """
        turns = sum(
            (jnp.where(member == i, before, 0) for i, before in enumerate(self.turns)),
            start=jnp.int32(0),
        )
        slot = slots.slot_of_member(self.own, member, self.team.axes)
        return self._receive(slot, turns, shape, dtype, turn, word)

    def _receive(
        self, slot: Any, turns: Any, shape: tuple[int, ...], dtype: Any, turn: Any, word: Any
    ) -> jax.Array:
        flag, at = self._of_turn(turns, turn, slot)
        return message_receiving.collect(
            *(shape, dtype, self.own, at + word, flag),
            bare=self.bare,
            sender=slot,
            site=self.site,
        )

    def close(self, turns: int | jax.Array) -> None:
        """Ends the exchange after so many turns of this launch; called once, last."""
        for (_, slot), before in zip(self._others(), self.turns, strict=True):
            heap_words.write_word(self.own, self._count(slot), before + turns)

    def _others(self) -> list[tuple[Any, jax.Array]]:
        """(member, slot) of every correspondent."""
        axes, size = self.team.axes, self.team.size
        if self.in_order:
            return [(i, slots.slot_of_member(self.own, i, axes)) for i in range(size)]
        own, found = self.member(), []
        for offset in self.team.peer_offsets:
            which = lax.rem(own + offset, jnp.int32(size))
            found.append((which, slots.slot_of_member(self.own, which, axes)))
        return found

    def _count(self, slot: jax.Array) -> jax.Array:
        return heap.TURNS + slot * heap.CHANNELS + self.block

    def _of_turn(self, before: jax.Array, turn: Any, sender: jax.Array) -> tuple[Any, Any]:
        """The flag of a turn, and where a sender's half of the turn begins.

        Memory that nobody has written holds zeros, so no flag is 0, also once the count has come
        round.
        """
        count = before + turn
        half = count & 1
        at = (sender * heap.CHANNELS + self.block) * 2 + half
        first = heap.MAIL + at * heap.HALF_WORDS
        return 2 * count + 1, first + (heap.FLAGGED_WORDS if self.bare else 0)


def launch(
    body: Callable[..., None],
    *operands: jax.Array,
    name: str,
    team: Team,
    out_type: Sequence[jax.ShapeDtypeStruct],
    num_blocks: int,
    in_order: bool = False,
    bare: bool = False,
    invariant: bool = False,
    scratch: Mapping[str, Any] | None = None,
    interpret: Any = None,
) -> list[jax.Array]:
    """Runs `body(mail, *operand_refs, *out_refs, **scratch)` in blocks of one warpgroup.

    The body reaches its peers by its `Mail` alone; it must call `mail.close`.

    Args:
      body: the kernel.
      *operands: arrays, this device's shards.
      name: of the kernel, in reports and profiles.
      team: the devices that run it together.
      out_type: shape and type of each result, per device.
      num_blocks: at most `heap.CHANNELS`, and so few that something else can run beside them.
      in_order, bare: the mail's.
      invariant: all members compute bitwise the same results, which are then typed as not varying
        over the team's axes.
      scratch: shared memory, by name.
      interpret: `simulator.SimulatorParams()` to run this one kernel in the simulator.

    Returns:
      The results, in the order of `out_type`; typed like those of `kernel.launch`.

    Raises:
      ValueError: a number of blocks out of that range.
    """
    if not 1 <= num_blocks <= most_blocks():
        raise ValueError(
            f"kernel {name}: num_blocks={num_blocks} must be from 1 to {most_blocks()}."
        )

    def whole_body(place_ref: Any, *refs: Any, **scratch_refs: Any) -> None:
        block, options = lax.axis_index(kernel.GRID_AXIS), dict(in_order=in_order, bare=bare)
        mail = Mail.open(team, place_ref[0], block, name, **options)
        body(mail, *refs, **scratch_refs)

    whole_body.__name__ = name
    call = plgpu.kernel(
        whole_body,
        out_type=list(out_type),
        scratch_types=dict(scratch or {}),
        grid=(num_blocks,),
        grid_names=(kernel.GRID_AXIS,),
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(lowering_semantics=mosaic.LoweringSemantics.Lane),
        interpret=interpret,
    )
    place = slots.place()
    operands = arguments.as_arrays(operands)
    structs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (place, *operands)]
    with team_kernel.tracing():
        traced = jax.make_jaxpr(call)(*structs)
    info = TeamKernelInfo(name=name, axes=team.axes, by_heap=True)
    outs = team_kernel.bind_team_kernel(traced, (place, *operands), info)
    outs = lax.optimization_barrier(outs)
    varying = frozenset(team.axes).union(*map(varying_axes, operands))
    if invariant:
        varying -= frozenset(team.axes)
    return [make_varying(out, varying) for out in outs]
