"""Which row each entry of a block's chunks goes to, found by warpgroups in shared memory.

A chunk is some tokens of a device. Its entries are their choices in order, in vectors of `LANES`.
An entry's row is the sum of three numbers:

| number | of | found by |
|---|---|---|
| the first row of the expert's group of that device | all counts | `find_first_rows` |
| entries of that expert in the device's chunks before | the counts of those | `sum_counts` |
| entries of that expert before it in its chunk | its entries | `rank` |

A thread has an entry, or an expert, of each vector.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed import schedule
from stretto.distributed.primitives import warpgroup_tables
from stretto.distributed.schedule import Int
from stretto.distributed.team import Team
from stretto.kernels.collectives.chunk_shape import COUNTS_SLOTS, LANES, Shape
from stretto.kernels.collectives.token_tables import load
from stretto.kernels.problem.routing import NONE

MOST_UNROLLED = 12
"""Chunks that a loop adds at once: each waits for its loads, which are under way together."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tables:
    """The tables of one block's chunks, one of each device, in a kernel.

    Attributes:
      tokens: of this block's chunks.
      entries: `[devices, vectors * LANES]`, by the offset of the device on the ring. Some of the
        next chunk may follow, and then none (`clear_ends`).
      places: likewise, how many entries before each in its chunk have its expert, and then how
        many each expert has there (`rank`); the former become rows here, or none (`place`).
      own_positions: `[vectors * LANES]`, those of this device's tokens as `Routing.positions` has
        them (`place`).
      own_counts: int16, `Shape.counts` of this device's chunk (`store_counts`), and more zeros.
      sums: `[devices, experts]`, entries of each expert in all chunks of a device.
      firsts: likewise, those in the chunks before; then the row of the first one of the chunk.
      strays: `[devices]`, entries that are out of range.
      scan: `[2 * experts]`, for sums over experts.
      counts_of, counts_arrived: slots of each warpgroup for counts of chunks, and for each slot.
    """

    shape: Shape
    team: Team
    tokens: Int
    entries: Any
    places: Any
    own_positions: Any
    own_counts: Any
    sums: Any
    firsts: Any
    strays: Any
    scan: Any
    counts_of: Any
    counts_arrived: Any

    def clear_ends(self) -> None:
        """Writes none to what fills up the last vectors, before entries are loaded."""
        if self.shape.entries % LANES:
            for offset in range(self.shape.devices):
                self.entries[offset, _of_vector(self.shape.vectors - 1)] = _zeros() + NONE
            plgpu.commit_smem()

    def rank(self, offset: Int, scratch: Any) -> None:
        """Finds how many entries before each in its chunk have its expert, and counts them.

        An entry that is out of range has the number after the last expert.
        """
        shape, experts = self.shape, self.shape.num_experts
        size = shape.vectors * LANES
        entry = plgpu.layout_cast(self.entries[offset], _layout(size))
        is_stray = (entry >= experts) | (entry < NONE)
        is_filled = _lanes(size) < self.tokens * shape.top_k
        kind = jnp.where(is_filled, jnp.where(is_stray, experts, entry), NONE)
        self.places[offset] = warpgroup_tables.ranks_and_counts(kind, experts + 1, scratch)

    def store_counts(self) -> None:
        """Readies the counts of this device's chunk for the copy engine."""
        first, number = self.shape.vectors * LANES, self.own_counts.shape[0]
        counts = plgpu.layout_cast(self.places[0, pl.ds(first, number)], _layout(number))
        self.own_counts[...] = counts.astype(jnp.int16)
        plgpu.commit_smem()

    def sum_counts(self, counts: Any, chunk: Int, worker: Int, workers: int) -> None:
        """Sums counts `[devices, chunks * Shape.counts]` of all chunks, and of those before `chunk`.

        Of so many `workers`, each a warpgroup, this one does so for its share of the devices.
        """  # noqa: E501
        slots, pieces = COUNTS_SLOTS, self._pieces(counts)
        total = schedule.share(self.shape.devices, worker, workers) * pieces

        def load_piece(number: Int) -> None:
            i = schedule.div(number, pieces)
            window = pl.ds((number - i * pieces) * self._piece, self._piece)
            slot = worker * slots + schedule.rem(number, slots)
            target = self.counts_of.at[slot]
            source = counts.at[worker + i * workers, window]
            load(source, target, self.counts_arrived.at[slot], flat=True)

        def of_device(i: jax.Array, _: None) -> None:
            def step(piece: jax.Array, found: tuple) -> tuple:
                number = i * pieces + piece
                slot = worker * slots + schedule.rem(number, slots)
                plgpu.barrier_wait(self.counts_arrived.at[slot])
                found = self._with_piece(slot, chunk - piece * self._together, found)
                plgpu.commit_smem()  # All threads have read the slot.
                following = number + slots
                pl.when(following < total)(lambda: load_piece(following))
                return found

            nothing = _zeros(self.shape.experts), _zeros(self.shape.experts), jnp.int32(0)
            whole, before, stray = lax.fori_loop(0, pieces, step, nothing)
            device = worker + i * workers
            self.sums[device] = whole
            self.firsts[device] = before
            self.strays[device] = stray

        for number in range(slots):
            pl.when(number < total)(lambda number=number: load_piece(jnp.int32(number)))
        lax.fori_loop(0, schedule.share(self.shape.devices, worker, workers), of_device, None)

    @property
    def _piece(self) -> int:
        """Counts that are loaded at once."""
        return self.counts_of.shape[1]

    @property
    def _together(self) -> int:
        """Chunks whose counts these are."""
        return self._piece // self.shape.counts

    def _pieces(self, counts: Any) -> int:
        """Of the counts of a device."""
        return counts.shape[1] // self._piece

    def _with_piece(self, slot: Int, chunk: Int, found: tuple) -> tuple:
        """(all counts, those of chunks before `chunk`, strays) with a piece's; from 0 in it."""

        def add(i: jax.Array, found: tuple) -> tuple:
            whole, before, stray = found
            first = i * self.shape.counts
            count = self._of_experts(self.counts_of.at[slot, pl.ds(first, self.shape.experts)])
            count = count.astype(jnp.int32)
            whole += count
            before += count * jnp.where(i < chunk, 1, 0)
            stray += self.counts_of[slot, first + self.shape.num_experts].astype(jnp.int32)
            return whole, before, stray

        unroll = next(n for n in range(MOST_UNROLLED, 0, -1) if self._together % n == 0)
        return lax.fori_loop(0, self._together, add, found, unroll=unroll)

    def find_first_rows(self) -> None:
        """Adds to each expert's entries in the chunks before what comes before the device's."""
        sums = [self._of_experts(self.sums.at[d]) for d in range(self.shape.devices)]
        first = self._before_experts(sum(sums[1:], start=sums[0]))
        for device, size in enumerate(sums):
            self.firsts[device] = first + self._of_experts(self.firsts.at[device])
            first += size

    def _before_experts(self, sizes: jax.Array) -> jax.Array:
        """Of each expert all entries of those before it on the same device."""
        own, room = self.shape.num_experts // self.shape.devices, self.shape.experts
        expert = _lanes(room)
        place = lax.rem(expert, jnp.full_like(expert, own))  # Among the experts of its device.
        found, step = sizes, 1
        self.scan[pl.ds(0, room)] = _zeros(room)
        while step < own:  # Each has the sum of `step` experts that end with it.
            self.scan[pl.ds(room, room)] = found
            earlier = self._of_experts(self.scan.at[pl.ds(room - step, room)])
            found += jnp.where(place >= step, earlier, 0)
            step *= 2
        return found - sizes

    def place(self, offset: Int, device: Int, first_expert: Int, scratch: Any) -> None:
        """Makes rows of ranks: of this device's chunk on all devices, of others' here."""
        shape, size = self.shape, self.shape.vectors * LANES
        own = shape.num_experts // shape.devices
        entry = plgpu.layout_cast(self.entries[offset], _layout(size))
        rank = plgpu.layout_cast(self.places[offset, pl.ds(0, size)], _layout(size))
        firsts = self._of_experts(self.firsts.at[device])
        row = rank + warpgroup_tables.looked_up(firsts, entry, scratch)
        here = (entry >= first_expert) & (entry < first_expert + own)
        self.places[offset, pl.ds(0, size)] = jnp.where(here, row, NONE)

        @pl.when(offset == 0)
        def _():
            goes = (entry >= 0) & (entry < shape.num_experts)
            where = lax.div(jnp.maximum(entry, 0), jnp.full_like(entry, own))
            self.own_positions[...] = jnp.where(goes, row * shape.devices + where, NONE)

        plgpu.commit_smem()

    def _of_experts(self, ref: Any) -> jax.Array:
        return plgpu.layout_cast(ref[...], _layout(self.shape.experts))


def _of_vector(number: int) -> Any:
    return pl.ds(number * LANES, LANES)


def _layout(size: int = LANES) -> Any:
    return plgpu.Layout.WG_STRIDED((size,), 1)


def _lanes(size: int = LANES) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, (size,), 0, layout=_layout(size))


def _zeros(size: int = LANES) -> jax.Array:
    return plgpu.layout_cast(jnp.zeros((size,), jnp.int32), _layout(size))
