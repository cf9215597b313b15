"""What the kernels that move tokens have in common: how a row is cut up, and who reads which table.

A row of `d` elements is seen as `[parts, columns]`, since the copy engine takes at most 256 elements
along a dimension. `positions` (`kernels/xla/routing.py`) and weights are read chunk by chunk through
shared memory (`table_shape`): of every device's tokens, on every device.
"""  # noqa: E501

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed import copies, kernel, residency, schedule
from stretto.distributed.kernel import THREAD_AXIS
from stretto.distributed.schedule import Int, ceil_div
from stretto.distributed.team import Team
from stretto.kernels.collectives.table_shape import TableShape
from stretto.kernels.problem.routing import NONE

MAX_COLUMNS = 256  # of the copy engine
ALIGNED_BYTES = 16  # of the copy engine
ALIGNED_TOKENS = 8  # Of chunks, where there are enough tokens.
REGISTER_BYTES = 1024  # that a warpgroup loads at once, 8 bytes a thread
TABLE_SLOTS = 3
"""One is filled while rows of a second are fetched and rows of a third are still in use."""


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of a matrix as `[parts, columns]`.

    Attributes:
      padded: parts in shared memory, so many that a warpgroup can load all of it at once, and that
        the next row begins where the copy engine takes it.
    """

    parts: int
    columns: int
    padded: int

    @classmethod
    def of(cls, width: int, itemsize: int) -> Row | None:
        """A row of `width` elements, with the fewest added; None if the copy engine takes none."""
        found = []
        for columns in range(1, min(width, MAX_COLUMNS) + 1):
            parts = width // columns
            if width % columns or columns * itemsize % ALIGNED_BYTES or parts > MAX_COLUMNS:
                continue
            padded = parts
            while padded * columns * itemsize % REGISTER_BYTES:
                padded += 1
            found.append(cls(parts, columns, padded))
        return min(found, key=lambda row: (row.padded * row.columns, row.parts), default=None)

    def padded_bytes(self, itemsize: int) -> int:
        """In shared memory."""
        return self.padded * self.columns * itemsize


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chunks:
    """The tokens of devices in chunks, which the blocks of a device share out.

    Of several warpgroups in a block each has chunks of its own, and slots of its own for whatever
    passes through shared memory.

    Attributes:
      team: the devices.
      tokens: of a chunk.
      number: of chunks of one device.
      num_blocks: of the kernel.
      rounds: how often each block walks through its chunks.
      warpgroups: of a block that walk through chunks; with several there is one round.
      flat: what is loaded is (`load`).
      whose: the devices whose tokens these are, by their offsets on the ring; all by default.
      first_block: of the kernel, where others do something else.
      warpgroup: whose chunks these are, where a warp of another one walks through them; None for
        the warpgroup that does.
    """

    team: Team
    tokens: int
    number: int
    num_blocks: int
    rounds: int = 1
    warpgroups: int = 1
    flat: bool = False
    whose: range | None = None
    first_block: int = 0
    warpgroup: Int | None = None

    @classmethod
    def of(
        cls,
        team: Team,
        tokens: int,
        most: int,
        num_blocks: int,
        warpgroups: int = 1,
        flat: bool = False,
    ) -> Chunks:
        """Chunks of `tokens` tokens a device, small enough for every warpgroup to have one."""
        blocks = min(num_blocks, residency.num_multiprocessors())
        fair = ceil_div(team.size * tokens, blocks * warpgroups)
        fair = ceil_div(fair, ALIGNED_TOKENS) * ALIGNED_TOKENS
        size = min(most, fair)
        number = ceil_div(tokens, size)
        blocks = min(blocks, number * team.size)
        return cls(
            team=team,
            tokens=size,
            number=number,
            num_blocks=blocks,
            warpgroups=warpgroups,
            flat=flat,
        )

    @property
    def offsets(self) -> range:
        """The devices whose tokens these are, by their offsets on the ring."""
        return range(self.team.size) if self.whose is None else self.whose

    @property
    def _warpgroup(self) -> Int:
        if self.warpgroups == 1:
            return 0
        if self.warpgroup is not None:
            return self.warpgroup
        return lax.axis_index(THREAD_AXIS)

    @property
    def _walker(self) -> Int:
        """The number of this warpgroup: one of each block comes before the second of any."""
        block = kernel.block_id()
        if self.first_block:
            block = block - self.first_block
        return block if self.warpgroups == 1 else block + self._warpgroup * self.num_blocks

    def slot(self, number: Int, slots: int) -> Int:
        """The slot for what has such a number, of `slots` that this warpgroup takes in turn."""
        slot = schedule.rem(number, slots)
        return slot if self.warpgroups == 1 else self._warpgroup * slots + slot

    @property
    def own_of_a_round(self) -> Int:
        """How many of them this warpgroup has."""
        walkers = self.num_blocks * self.warpgroups
        return schedule.share(len(self.offsets) * self.number, self._walker, walkers)

    @property
    def own(self) -> Int:
        """The same in all rounds together."""
        return self.own_of_a_round if self.rounds == 1 else self.own_of_a_round * self.rounds

    def round_of(self, n: Int) -> Int:
        """The round in which this block walks through its chunk `n`, of all rounds."""
        return lax.div(n, jnp.maximum(self.own_of_a_round, 1))

    def place(self, n: Int) -> tuple[Int, Int]:
        """(whose, its first token) of this warpgroup's chunk `n`; whose as an offset on the ring.

        At the same time, all devices read from different ones.
        """
        if self.rounds > 1:
            n = n - self.round_of(n) * self.own_of_a_round
        size = len(self.offsets)
        i = self._walker + n * (self.num_blocks * self.warpgroups)
        chunk = schedule.div(i, size)
        whose = i - chunk * size
        if self.warpgroups > 1 and self.num_blocks % size == 0:
            # Or all chunks of a block were of the same device, and some blocks had all far ones.
            whose = schedule.rem(whose + self._warpgroup + n * self.warpgroups, size)
        return whose + self.offsets.start, chunk * self.tokens

    def table(self, top_k: int) -> TableShape:
        """How a table of `top_k` choices lies in memory."""
        return TableShape(self.tokens, top_k)

    def scratch(self, top_k: int, dtype: Any) -> Any:
        """Shared memory for the chunks of such a table."""
        slots = self.warpgroups * TABLE_SLOTS
        return plgpu.SMEM((slots, *self.table(top_k).in_memory), dtype)

    def table_bytes(self, top_k: int) -> int:
        """The same in bytes."""
        return self.warpgroups * table_bytes(self.tokens, top_k)


def table_bytes(tokens: int, top_k: int) -> int:
    """Shared memory of a warpgroup for chunks of so many tokens of a table."""
    return TABLE_SLOTS * TableShape(tokens, top_k).num_bytes


def check_chunk(chunk: int) -> None:
    """Raises ValueError unless so many tokens can be a chunk."""
    if chunk not in (1, 2, 4) and (chunk % ALIGNED_TOKENS or not 8 <= chunk <= 256):
        raise ValueError(f"chunk={chunk} must be 1, 2, 4 or a multiple of 8 from 8 to 256.")


def load(source: Any, target: Any, barrier: Any, *, flat: bool) -> None:
    """Starts to load what is contiguous and within its array, in shared memory as well.

    `flat` makes it a copy of so many bytes, which needs no descriptor of the array: the host makes
    one for each array and peer at every launch.
    """
    mode = plgpu.OOBFillMode.PROMISE_IN_BOUNDS if flat else None
    plgpu.copy_gmem_to_smem(source, target, barrier, oob_mode=mode)


def everyones(ref: Any, team: Team) -> list[Any]:
    """`ref` as each device has it, by its offset on the ring."""
    return [ref, *(copies.remote(ref, team, team.neighbour(i)) for i in team.peer_offsets)]


def of_device(refs: list[Any], offset: Int, fun: Any) -> None:
    """`fun` of the ref at `offset`; the copy engine needs the ref while the kernel is traced."""
    if len(refs) == 1:
        fun(refs[0])
        return
    for index, ref in enumerate(refs):
        pl.when(offset == index)(lambda ref=ref: fun(ref))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tables:
    """Tables of all devices, chunk by chunk in shared memory.

    Attributes:
      chunks: which ones this block has.
      top_k: choices of a token.
      sources: of each table, what `everyones` gives.
      slots: of each table, its shared memory (`Chunks.scratch`).
      arrived: a barrier a slot, with an arrival for each table.
      me: this device, read once: in a loop with barriers it would be read from memory each time.
    """

    chunks: Chunks
    top_k: int
    sources: list[list[Any]]
    slots: list[Any]
    arrived: Any
    me: Int

    def fetch(self, n: Int) -> None:
        """Starts to load chunk `n` of this block, if there is one."""

        @pl.when(n < self.chunks.own)
        def _():
            offset, first = self.chunks.place(n)
            slot = self.chunks.slot(n, TABLE_SLOTS)
            rows = self._shape.rows
            window = pl.ds(rows(first), rows(self.chunks.tokens))
            for refs, target in zip(self.sources, self.slots, strict=True):
                of_device(
                    refs,
                    offset,
                    lambda ref, target=target: load(
                        ref.at[window],
                        self._of_chunk(target.at[slot]),
                        self.arrived.at[slot],
                        flat=self.chunks.flat,
                    ),
                )

    @property
    def _shape(self) -> TableShape:
        return self.chunks.table(self.top_k)

    def _of_chunk(self, slot: Any) -> Any:
        rows = self._shape.rows(self.chunks.tokens)
        return slot if rows == slot.shape[0] else slot.at[pl.ds(0, rows)]

    def enter(self, n: Int) -> None:
        """Returns once chunk `n` is loaded, and starts the next load; called once for each."""
        self.wait(n)
        self.fetch(n + 1)

    def wait(self, n: Int) -> None:
        """Returns once chunk `n` is loaded, where a warp of its own loads it; called once."""
        plgpu.barrier_wait(self.arrived.at[self.chunks.slot(n, TABLE_SLOTS)])

    def row(self, n: Int, token: Int, choice: int) -> tuple[jax.Array, Int]:
        """(whether a token's choice is on this device, its row here); tokens from 0 in a chunk."""
        value = self._entry(n, token, choice)
        return self._is_on(value, self.me), schedule.div(value, self.chunks.team.size)

    def number(self, table: int, n: Int, token: Int, choice: int) -> jax.Array:
        """What a table has for a token's choice."""
        slot = self.chunks.slot(n, TABLE_SLOTS)
        return self.slots[table][slot, *self._shape.place(token, choice)]

    def reaches(self, n: Int, token: Int, device: Int) -> jax.Array:
        """Whether any choice of a token is on a device."""
        found = jnp.bool_(False)
        for choice in range(self.top_k):
            found |= self._is_on(self._entry(n, token, choice), device)
        return found

    def _entry(self, n: Int, token: Int, choice: int) -> jax.Array:
        return self.number(0, n, token, choice)

    def _is_on(self, entry: jax.Array, device: Int) -> jax.Array:
        found = entry != NONE
        if not self.chunks.team.is_alone:
            found &= schedule.rem(entry, self.chunks.team.size) == device
        return found
