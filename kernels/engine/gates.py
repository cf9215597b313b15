"""Gates between a polling warp, which waits for operands to arrive, and the loading role.

The loading role cannot wait itself: under load, polling a semaphore in global memory takes longer
than the stages that are loaded last. So another warp polls, up to `SLOTS` waits ahead, and forwards
what it finds through barriers of the block.

| barrier | arrives | waits | count | proves |
|---|---|---|---|---|
| `opened[slot]` | polling warp | loading role | 1 | the operands are in place up to the next gate |
| `passed[slot]` | loading role | polling warp | 1 | the slot may be used again |
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from stretto.distributed.schedule import Int, div, rem
from stretto.kernels.engine.block import Block
from stretto.kernels.engine.parts import Arrival, Ref, Stream, Tile
from stretto.kernels.engine.remainder import Part

SLOTS = 4


def scratch() -> dict[str, Any]:
    """The barriers, by name, for `kernel.launch`."""
    return dict(opened=plgpu.Barrier(num_barriers=SLOTS), passed=plgpu.Barrier(num_barriers=SLOTS))


@dataclasses.dataclass(frozen=True)
class Gates:
    """The gates of a block.

    Attributes:
      block: whose tiles are loaded.
      arrival: what a gate waits for.
      tile_k: of the contraction, loaded at once.
      opened, passed: the barriers.
    """

    block: Block
    arrival: Arrival
    tile_k: int
    opened: Ref
    passed: Ref

    @property
    def tiles_per_gate(self) -> int:
        """Tiles along the contraction from one gate to the next."""
        return self.arrival.columns // self.tile_k

    def poll(self, before: Callable[[], None]) -> None:
        """The polling warp: calls `before`, then waits for the operands of tile after tile."""

        def tile_loop(i: jax.Array, _: None) -> None:
            tile = self.block.tile(i)

            def gate_loop(gate: jax.Array, _: None) -> None:
                slot = self._slot(i, gate)
                # The loading role has passed the gate that had this slot before.
                plgpu.barrier_wait(self.passed.at[slot])
                self.arrival.wait(tile, gate)
                # Publishes to the loading role that the operands have arrived.
                plgpu.barrier_arrive(self.opened.at[slot])

            first, end = self._of_tile(tile)
            if tile.part is not None:
                # What the first gates of the tile prove holds for all of it (scales).
                lax.fori_loop(0, first, lambda gate, _: self.arrival.wait(tile, gate), None)
            lax.fori_loop(first, end, gate_loop, None)

        with jax.named_scope("poll arrivals"):
            before()
            lax.fori_loop(0, self.block.num_tiles, tile_loop, None)

    def free_slots(self) -> None:
        """Called by the loading role once, before its first tile."""
        for slot in range(SLOTS):
            plgpu.barrier_arrive(self.passed.at[slot])  # All slots are free at the start.

    def go_through(self, i: Int, k: jax.Array, part: Part | None = None) -> None:
        """Called by the loading role ahead of tile `k` along the contraction of its `i`-th tile.

        Or of a `part` of it.
        """
        is_gate = rem(k, self.tiles_per_gate) == 0
        if part is not None:
            is_gate |= k == part.first

        @pl.when(is_gate)
        def _():
            slot = self._slot(i, div(k, self.tiles_per_gate))
            # The polling warp has seen the operands arrive, up to the next gate.
            plgpu.barrier_wait(self.opened.at[slot])
            # Publishes to the polling warp that the slot is free.
            plgpu.barrier_arrive(self.passed.at[slot])

    def _of_tile(self, tile: Tile) -> tuple[Int, Int]:
        """The first gate of a tile, or of this block's part of it, and the one after the last."""
        first = 0 if tile.part is None else tile.part.first
        along = self._along(first + self.block.k_tiles(tile))
        return div(first, self.tiles_per_gate), along

    def _along(self, k_tiles: Int) -> Int:
        """Gates along a contraction of so many tiles."""
        return div(k_tiles + self.tiles_per_gate - 1, self.tiles_per_gate)

    def _slot(self, i: Int, gate: Int) -> Int:
        """The slot of a gate of the block's `i`-th tile, the same in both roles.

        Any function is correct; the later slots repeat, the further ahead the polling warp can be.
        """
        k_tiles = self.block.parts.k_tiles
        first = i * self._along(k_tiles) if isinstance(k_tiles, int) else i
        return rem(first + gate, SLOTS)


def arrival_of(streams: Sequence[Stream]) -> Arrival:
    """What the operands wait for together, gate by gate; at least one of them waits."""
    arrivals = [stream.arrival for stream in streams if stream.arrival is not None]
    columns = math.gcd(*(arrival.columns for arrival in arrivals))

    def wait(tile: Tile, gate: Int) -> None:
        for arrival in arrivals:
            gates = arrival.columns // columns  # Of the common ones, to one of its own.
            if gates == 1:
                arrival.wait(tile, gate)
            else:
                own = div(gate, gates)
                pl.when(rem(gate, gates) == 0)(lambda a=arrival, own=own: a.wait(tile, own))

    return Arrival(columns=columns, wait=wait)
