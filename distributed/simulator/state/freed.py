"""Memory that a scope gives back, and that a later scope of the block gets.

Mosaic GPU stacks the memory of scopes: one begins where those around it end, so the next scope at
the same place has the bytes of the last. Nothing waits when a scope ends. A copy that is under way
then, or a store without `commit_smem`, meets what the next scope does with those bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from stretto.distributed.simulator.state.arithmetic import bit_width
from stretto.distributed.simulator.state.memory import Buffer, Region

if TYPE_CHECKING:
    from stretto.distributed.simulator.state.races import RaceDetector


def _cell_bits(buffer: Buffer) -> int:
    """Bits of memory that one mark of a buffer is for."""
    if buffer.cells_per_byte > 1:
        return 8 // buffer.cells_per_byte
    return bit_width(buffer.data.dtype)


def _bits(buffer: Buffer) -> range:
    """Where a buffer lies in the shared memory of its block."""
    first = buffer.start * 8
    return range(first, first + buffer.writes.size * _cell_bits(buffer))


def _overlap(new: Buffer, old: Buffer) -> bool:
    """Whether the buffers have some of their memory in common.

    Tensor memory lies in columns, of which only the same ones are compared.
    """
    if new.space != old.space:
        return False
    if new.space == "tmem":
        return (new.start, new.data.shape, new.data.dtype) == (
            old.start, old.data.shape, old.data.dtype,
        )  # fmt: skip
    ours, theirs = _bits(new), _bits(old)
    return max(ours.start, theirs.start) < min(ours.stop, theirs.stop)


def _cells_in(new: Buffer, old: Buffer, cells: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where `cells` of `old` lie in `new`: those that do, and their places there."""
    offset = _bits(old).start - _bits(new).start
    places = (cells * _cell_bits(old) + offset) // _cell_bits(new)
    inside = (places >= 0) & (places < new.writes.size)
    return cells[inside], places[inside]


class _Cells(Region):
    """Some elements of a buffer, by their places in it."""

    __slots__ = ()

    def __init__(self, buffer: Buffer, places: np.ndarray):
        super().__init__(buffer, (lambda array, _: array.reshape(-1),), places)


def give_back(freed: list[Buffer], buffer: Buffer) -> None:
    """Adds a buffer of a scope that has ended to those of its block, the latest last."""

    def is_inside(old: Buffer) -> bool:
        mine, its = _bits(buffer), _bits(old)
        return _overlap(buffer, old) and mine.start <= its.start and its.stop <= mine.stop

    # What was done to those that are inside, `buffer` has inherited.
    kept = [old for old in freed if not is_inside(old)]
    for old in kept:
        old.heirs = [heir for heir in old.heirs if heir in kept or heir not in freed]
    freed[:] = [*kept, buffer]


def inherit(detector: RaceDetector, freed: list[Buffer], buffer: Buffer) -> None:
    """Marks in a new `buffer` what was done to its memory in scopes that have ended."""
    for old in freed:
        if not _overlap(buffer, old):
            continue
        old.heirs.append(buffer)
        places, cells = _cells_in(old, buffer, np.arange(buffer.writes.size))
        writes = old.writes.reshape(-1)[cells]
        gone = np.array(writes)
        for number in np.unique(writes).tolist():
            gone[writes == number] = detector.gone(number)
        buffer.writes.reshape(-1)[places] = gone
        buffer.reads.reshape(-1)[places] = old.reads.reshape(-1)[cells]


def in_heirs(region: Region) -> Iterator[Region]:
    """The elements of buffers that have now, or had since, the memory of a region given back."""
    if not region.buffer.heirs:
        return
    seen, left = {region.buffer}, deque([(region.buffer, region.cells().reshape(-1))])
    while left:
        buffer, cells = left.popleft()
        for heir in buffer.heirs:
            _, places = _cells_in(heir, buffer, cells)
            if places.size and heir not in seen:
                seen.add(heir)
                yield _Cells(heir, np.unique(places))
                left.append((heir, places))
