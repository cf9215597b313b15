"""Which row each entry of a block's chunks goes to, found by one warpgroup in shared memory.

A chunk is some tokens of a device. Its entries are their choices in order, in vectors of `LANES`.
An entry's row is the sum of three numbers:

| number | of | found by |
|---|---|---|
| the first row of the expert's group of that device | all counts | `find_first_rows` |
| entries of that expert in the device's chunks before | the counts of those | `find_first_rows` |
| entries of that expert before it in its chunk | comparisons with each other | `rank` |

A thread has an entry, or an expert, of each vector. What all are compared with is read as a scalar,
which all threads get at once. A count has 16 bits; the upper half of the first one counts entries
that are out of range.
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
from stretto.distributed.schedule import Int, ceil_div
from stretto.distributed.team import Team
from stretto.kernels.collectives.chunk_shape import LANES, UNROLLED, Shape
from stretto.kernels.collectives.token_tables import load
from stretto.kernels.problem.routing import NONE

HALF = 16
"""Bits of a count."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tables:
    """The tables of one block's chunks, one of each device, in a kernel.

    Attributes:
      tokens: of this block's chunks; their entries are a multiple of `UNROLLED`.
      entries: `[devices, vectors * LANES]`, by the offset of the device on the ring. Some of the
        next chunk may follow, and then none (`clear_ends`).
      places: likewise: the place of each in its chunk (`rank`), then its row here (`place`), or none.
      own_positions: `[vectors * LANES]`, those of this device's tokens as `Routing.positions` has them.
      own_counts: `[expert_vectors, LANES]`, of this device's chunk (`count`).
      sums: `[2, expert_vectors, LANES]`: entries of each expert; first in the other half, and zeros,
        those that are out of range.
      firsts: `[devices, expert_vectors, LANES]`, the row of the first entry of each chunk.
      counts_of, counts_arrived: slots for counts of chunks.
    """  # noqa: E501

    shape: Shape
    team: Team
    tokens: Int
    entries: Any
    places: Any
    own_positions: Any
    own_counts: Any
    sums: Any
    firsts: Any
    counts_of: Any
    counts_arrived: Any

    def clear_ends(self) -> None:
        """Writes none to what fills up the last vectors, before entries are loaded."""
        if self.shape.entries % LANES:
            for offset in range(self.shape.devices):
                self.entries[offset, _of_vector(self.shape.vectors - 1)] = _zeros() + NONE
            plgpu.commit_smem()

    def count(self) -> None:
        """Counts this device's chunk."""
        lane, chosen = _lanes(), self._loaded(self.entries, 0)
        stray = sum(
            jnp.sum(jnp.where(self._is_stray(x) & (lane < self._filled(v)), 1, 0))
            for v, x in enumerate(chosen)
        )

        def step(i: jax.Array, counts: tuple[jax.Array, ...], vector: int) -> tuple:
            for j in range(UNROLLED):
                entry = self.entries[0, vector * LANES + i * UNROLLED + j]
                counts = tuple(
                    count + jnp.where(lane == entry - w * LANES, 1, 0)
                    for w, count in enumerate(counts)
                )
            return counts

        counts = tuple(_zeros() for _ in range(self.shape.expert_vectors))
        for v in range(self.shape.vectors):
            number = self._steps(v)
            counts = lax.fori_loop(0, number, lambda i, x, v=v: step(i, x, v), counts)
        for w, count in enumerate(counts):
            also = jnp.where(lane == 0, stray << HALF, 0) if w == 0 else 0
            self.own_counts[w] = count + also
        plgpu.commit_smem()

    def rank(self, offset: int) -> None:
        """Finds how many entries before each in its chunk have its expert."""
        lane, chosen = _lanes(), self._loaded(self.entries, offset)
        ranks = [_zeros() for _ in chosen]

        def step(i: jax.Array, found: tuple[jax.Array, ...], v: int) -> tuple:
            for j in range(UNROLLED):
                number = i * UNROLLED + j
                entry = self.entries[offset, v * LANES + number]
                first, *others = (x == entry for x in chosen[v:])
                alike = (first & (lane > number), *others)
                found = tuple(x + jnp.where(y, 1, 0) for x, y in zip(found, alike, strict=True))
            return found

        for v in range(len(chosen)):
            found = lax.fori_loop(
                0, self._steps(v), lambda i, x, v=v: step(i, x, v), tuple(ranks[v:])
            )
            ranks[v:] = found
        for v, rank in enumerate(ranks):
            self.places[offset, _of_vector(v)] = rank

    def _is_stray(self, entry: jax.Array) -> jax.Array:
        return (entry >= self.shape.num_experts) | (entry < NONE)

    def _filled(self, vector: int) -> Int:
        """How many entries of a vector are the tokens', a multiple of `UNROLLED`."""
        return jnp.clip(self.tokens * self.shape.top_k - vector * LANES, 0, LANES)

    def _steps(self, vector: int) -> Int:
        """For all entries of a vector.

        Were it a constant, the compiler would unroll the whole loop, for half a minute.
        """
        return schedule.div(self._filled(vector), UNROLLED)

    def find_first_rows(self, counts: Any, chunk: Int) -> None:
        """Sums counts `[devices, chunks, expert_vectors, LANES]` of all, and of those before."""
        sums, stray = [], [_zeros() for _ in range(self.shape.expert_vectors)]
        together = self.counts_of.shape[1]
        pieces = counts.shape[1] // together
        for number in range(min(self.counts_of.shape[0], self.shape.devices * pieces)):
            self._load_counts(counts, jnp.int32(number), pieces)
        for device in range(self.shape.devices):
            both, stray = self._sums_of(counts, device, pieces, chunk, stray)
            sums.append(both)
        every = [sum(both[0][w] for both in sums) for w in range(self.shape.expert_vectors)]
        for w, (number, strays) in enumerate(zip(every, stray, strict=True)):
            self.sums[0, w] = number
            self.sums[1, w] = strays
        plgpu.commit_smem()
        first = self._before_experts()
        for device, (whole, before) in enumerate(sums):
            for w in range(self.shape.expert_vectors):
                self.firsts[device, w] = first[w] + before[w]
                first[w] += whole[w]

    def _load_counts(self, counts: Any, number: Int, pieces: int) -> None:
        """Starts to load a piece of the counts of all devices."""
        slot = schedule.rem(number, self.counts_of.shape[0])
        device = schedule.div(number, pieces)
        together = self.counts_of.shape[1]
        window = pl.ds((number - device * pieces) * together, together)
        target, arrived = self.counts_of.at[slot], self.counts_arrived.at[slot]
        load(counts.at[device, window], target, arrived, flat=True)

    def _sums_of(
        self, counts: Any, device: int, pieces: int, chunk: Int, stray: list[jax.Array]
    ) -> tuple[tuple[list[jax.Array], list[jax.Array]], list[jax.Array]]:
        """((all of a device's counts, of chunks before `chunk`), entries out of range added)."""
        slots, together, vectors, _ = self.counts_of.shape

        def add(i: jax.Array, found: tuple, slot: Int, first: Int) -> tuple:
            whole, before, stray = (list(x) for x in found)
            is_before = jnp.where(first + i < chunk, 1, 0)
            for w in range(vectors):
                word = self._vector(self.counts_of.at[slot, i, w])
                count = word & (2**HALF - 1)
                whole[w] += count
                before[w] += count * is_before
                if w == 0:
                    stray[w] += word >> HALF
            return tuple(whole), tuple(before), tuple(stray)

        def step(piece: jax.Array, found: tuple) -> tuple:
            number = device * pieces + piece
            slot = schedule.rem(number, slots)
            plgpu.barrier_wait(self.counts_arrived.at[slot])
            found = lax.fori_loop(
                *(0, together),
                lambda i, x: add(i, x, slot, piece * together),
                found,
                unroll=next(n for n in range(UNROLLED, 0, -1) if together % n == 0),
            )
            plgpu.commit_smem()  # All threads have read the slot.
            following = number + slots
            pl.when(following < self.shape.devices * pieces)(
                lambda: self._load_counts(counts, following, pieces)
            )
            return found

        nothing = tuple(_zeros() for _ in range(vectors))
        whole, before, stray_ = lax.fori_loop(0, pieces, step, (nothing, nothing, tuple(stray)))
        return (list(whole), list(before)), list(stray_)

    def _before_experts(self) -> list[jax.Array]:
        """Of each expert all entries of those before it on the same device."""
        own = self.shape.num_experts // self.shape.devices
        experts = [_lanes() + w * LANES for w in range(self.shape.expert_vectors)]
        firsts = [lax.div(expert, jnp.full_like(expert, own)) * own for expert in experts]
        found = tuple(_zeros() for _ in experts)
        for v in range(self.shape.expert_vectors):
            count = min(LANES, self.shape.num_experts - v * LANES)

            def step(i: jax.Array, found: tuple, v: int = v) -> tuple:
                for j in range(UNROLLED):
                    number = i * UNROLLED + j
                    expert, size = v * LANES + number, self.sums[0, v, number]
                    found = tuple(
                        x + jnp.where((expert < this) & (expert >= first), size, 0)
                        for x, this, first in zip(found, experts, firsts, strict=True)
                    )
                return found

            found = lax.fori_loop(0, ceil_div(count, UNROLLED), step, found)
        return list(found)

    def place(self, offset: int, first_expert: Int) -> None:
        """Makes rows of places: of this device's chunk on all devices, of others' here."""
        shape, device = self.shape, self.team.neighbour(offset)
        own = shape.num_experts // shape.devices
        chosen, places = self._loaded(self.entries, offset), self._loaded(self.places, offset)
        low, count = (0, shape.num_experts) if offset == 0 else (first_expert, own)

        def step(i: jax.Array, found: tuple) -> tuple:
            expert = low + i
            vector = schedule.div(expert, LANES)
            first = self.firsts[device, vector, expert - vector * LANES]
            return tuple(
                x + jnp.where(entry == expert, first, 0)
                for x, entry in zip(found, chosen, strict=True)
            )

        unroll = next(n for n in (8, 4, 2, 1) if count % n == 0)
        places = lax.fori_loop(0, count, step, tuple(places), unroll=unroll)
        for v, (place, entry) in enumerate(zip(places, chosen, strict=True)):
            here = (entry >= first_expert) & (entry < first_expert + own)
            self.places[offset, _of_vector(v)] = jnp.where(here, place, NONE)
            if offset == 0:
                goes = (entry >= 0) & (entry < shape.num_experts)
                where = lax.div(jnp.maximum(entry, 0), jnp.full_like(entry, own))
                position = jnp.where(goes, place * shape.devices + where, NONE)
                self.own_positions[_of_vector(v)] = position
        plgpu.commit_smem()

    def _loaded(self, ref: Any, offset: int) -> list[jax.Array]:
        return [self._vector(ref.at[offset, _of_vector(v)]) for v in range(self.shape.vectors)]

    def _vector(self, ref: Any) -> jax.Array:
        return plgpu.layout_cast(ref[...], _layout())


def _of_vector(number: int) -> Any:
    return pl.ds(number * LANES, LANES)


def _layout() -> Any:
    return plgpu.Layout.WG_STRIDED((LANES,), 1)


def _lanes() -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, (LANES,), 0, layout=_layout())


def _zeros() -> jax.Array:
    return plgpu.layout_cast(jnp.zeros((LANES,), jnp.int32), _layout())
