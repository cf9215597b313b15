"""Buffers of simulated memory, and the regions of them that an operation touches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from stretto.distributed.simulator.state.packing import PackedView
from stretto.distributed.simulator.state.tiled_alias import TiledView

UNWRITTEN = 0
"""Id of the write record of memory that nobody has written since it was allocated."""

INITIAL = 1
"""Id of the write record of memory that was filled before the kernel started."""


class Buffer:
    """One allocation: an array, and for each element who wrote it and who has read it since.

    Attributes:
      name: what reports call it, such as "input 0" or "out_smem".
      space: "gmem", "smem" or "tmem".
      device: linear index of the device that owns it.
      block: linear index of the block that owns it; None for global memory.
      key: what names the same allocation on every device (or, in shared memory, in every block).
      data: the elements, in logical order: tiling and swizzling change no element's value, so they
        are not modelled.
      writes: int32, the id of the last write to each element (of a union: to each cell).
      reads: int32, the id of the set of reads since that write; 0 is the empty set.
      heirs: buffers of later scopes that got some of its memory.
      start: where it begins in the memory of its block: a byte, or a column of tensor memory.
      cells_per_byte: marks that a union keeps of each of its bytes; more than one if it has refs
        whose elements are below a byte, so that each element has a mark of its own.
    """

    __slots__ = (
        "block", "cells_per_byte", "data", "device", "heirs", "key", "name", "reads", "space",
        "start", "writes",
    )  # fmt: skip

    def __init__(
        self,
        data: np.ndarray,
        *,
        name: str,
        space: str,
        device: int,
        block: int | None,
        key: Any,
        written: bool,
        cells_per_byte: int = 1,
        start: int = 0,
    ):
        self.data = data
        self.name = name
        self.space = space
        self.device = device
        self.block = block
        self.key = key
        self.start = start
        self.heirs: list[Buffer] = []
        self.cells_per_byte = cells_per_byte
        cells = data.shape if cells_per_byte == 1 else (data.size * cells_per_byte,)
        self.writes = np.full(cells, INITIAL if written else UNWRITTEN, np.int32)
        self.reads = np.zeros(cells, np.int32)

    def describe(self) -> str:
        """The buffer in words."""
        if self.space == "gmem":
            return f"{self.name} of device {self.device}"
        space = "tensor" if self.space == "tmem" else "shared"
        return f"{self.name} in {space} memory of device {self.device} block {self.block}"


class Region:
    """The elements of a buffer that one operation touches.

    Args:
      buffer: whose elements.
      steps: functions that take an array shaped as the buffer to the array that `index` indexes;
        the bool says that the array holds bookkeeping, not data.
      index: the last index, applied on top.
    """

    __slots__ = ("buffer", "index", "steps")

    def __init__(
        self,
        buffer: Buffer,
        steps: tuple[Callable[[np.ndarray, bool], np.ndarray], ...],
        index: Any,
    ):
        self.buffer = buffer
        self.steps = steps
        self.index = index

    def _base(self, array: np.ndarray, bookkeeping: bool) -> np.ndarray:
        for step in self.steps:
            array = step(array, bookkeeping)
        return array

    def _place(self, array: np.ndarray, bookkeeping: bool) -> tuple[np.ndarray, Any]:
        """An array and an index of it that mean the region."""
        first = self.steps[0] if self.steps else None
        if not isinstance(first, TiledView):
            return self._base(array, bookkeeping), self.index
        order = first.order
        for step in self.steps[1:]:
            order = step(order, False)
        return first.flat(array, bookkeeping), order[self.index]

    def get(self) -> np.ndarray:
        """The elements; a view of the buffer where numpy can make one."""
        array, index = self._place(self.buffer.data, False)
        return array[index]

    def set(self, value: Any) -> None:
        """Writes the elements."""
        if self.steps and isinstance(self.steps[0], PackedView):
            elements = part = self.steps[0](self.buffer.data, False)
            for step in self.steps[1:]:
                part = step(part, False)
            part[self.index] = value
            self.steps[0].write_back(self.buffer.data, elements)
        else:
            array, index = self._place(self.buffer.data, False)
            array[index] = value

    def write_ids(self) -> np.ndarray:
        """Ids of the last writes of the elements (with one more axis for a union's cells)."""
        array, index = self._place(self.buffer.writes, True)
        return array[index]

    def read_ids(self) -> np.ndarray:
        """Ids of the read sets of the elements."""
        array, index = self._place(self.buffer.reads, True)
        return array[index]

    def cells(self) -> np.ndarray:
        """The places of the elements' marks in the buffer, counted in the order of memory."""
        marks = self.buffer.writes
        array, index = self._place(np.arange(marks.size).reshape(marks.shape), True)
        return array[index]

    def set_write_ids(self, value: int) -> None:
        """Marks the elements as written by the record `value`, and forgets their reads."""
        for marks, new in ((self.buffer.writes, value), (self.buffer.reads, 0)):
            array, index = self._place(marks, True)
            array[index] = new

    def set_read_ids(self, value: int | np.ndarray) -> None:
        """Sets the read sets of the elements."""
        array, index = self._place(self.buffer.reads, True)
        array[index] = value

    def describe(self) -> str:
        """The region in words: the buffer, and which part of it."""
        index = self.index if isinstance(self.index, tuple) else (self.index,)
        parts = []
        for i in index:
            if isinstance(i, slice):
                full = i.start is None and i.stop is None
                step = "" if i.step in (None, 1) else f":{i.step}"
                parts.append(":" if full else f"{i.start}:{i.stop}{step}")
            else:
                parts.append("..." if i is Ellipsis or isinstance(i, np.ndarray) else str(i))
        where = "" if parts in ([], ["..."]) else f"[{', '.join(parts)}]"
        return f"{self.buffer.name}{where}{self.buffer.describe()[len(self.buffer.name) :]}"


def poison(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array of what fresh memory holds: NaN, or for other types a pattern that stands out."""
    dtype = np.dtype(dtype)
    if dtype == np.bool_:
        return np.ones(shape, dtype)
    if dtype.kind in "iu":
        pattern = np.frombuffer(b"\xa5" * dtype.itemsize, dtype)[0]
        return np.full(shape, pattern, dtype)
    try:
        return np.full(shape, np.nan, dtype)
    except (ValueError, TypeError):  # A small float without NaN.
        return np.full(shape, 1, dtype)
