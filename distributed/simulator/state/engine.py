"""Windows of global memory as the copy engine takes them, which is not always as they are named."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from stretto.distributed.memory import windows
from stretto.distributed.memory.windows import Extent, Layout
from stretto.distributed.simulator.state.memory import Buffer, Region
from stretto.distributed.simulator.state.views import ViewPlan


@dataclass(frozen=True)
class Taken:
    """What a copy takes of global memory.

    Attributes:
      region: what of it lies inside the array.
      overhang: None if all does; else (shape of the window, index in it of what `region` holds).
      stray: elements of `region` that the window does not name; all, if it lies outside.
      why: that there are any, in words.
    """

    region: Region
    overhang: tuple | None
    stray: int = 0
    why: str = ""


class _InARow(Region):
    """Elements of a buffer in the order of its memory, from `first` on."""

    __slots__ = ()

    def __init__(self, buffer: Buffer, first: int, count: int):
        def in_a_row(array: np.ndarray, bookkeeping: bool) -> np.ndarray:
            return np.reshape(array, -1, copy=False)

        super().__init__(buffer, (in_a_row,), slice(first, first + count))

    def describe(self) -> str:
        """The region in words."""
        if self.index.start == self.index.stop:
            return f"nothing of {self.buffer.describe()}"
        return f"elements {self.index.start} to {self.index.stop - 1} of {self.buffer.describe()}"


def taken(plan: ViewPlan, buffer: Buffer, env: list, layout: Layout, *, may_be_flat: bool) -> Taken:
    """What a copy of the window that `plan` names in `buffer` takes.

    `layout` is that of the shared memory; `may_be_flat` is True for a store that does not reduce.
    """
    dims = plan.plain_window(buffer, env)
    if dims is None:
        return Taken(*plan.clipped(buffer, env))
    region, overhang = plan.bounded(buffer, dims)
    if overhang is None:
        return Taken(region, None)
    shape = buffer.data.shape
    window = [Extent(*d[:2]) if isinstance(d, list) else Extent(d, 1, True) for d in dims]
    given = [d[0] if isinstance(d, list) else d for d in dims]
    starts = windows.with_ignored_starts(shape, given, window, layout)
    if may_be_flat and windows.is_flat(shape, window, layout):
        return _flat(buffer, starts, overhang[0], region.get().size)
    if list(starts) == given:
        return Taken(region, overhang)
    moved = [[s, *d[1:]] if isinstance(d, list) else d for s, d in zip(starts, dims, strict=True)]
    region, overhang = plan.bounded(buffer, moved)
    why = "an index along a dimension of one element or tile is ignored"
    return Taken(region, overhang, region.get().size, why)


def _flat(buffer: Buffer, starts: tuple[int, ...], whole: tuple[int, ...], inside: int) -> Taken:
    """One flat copy, up to the end of the buffer, though the window ends before."""
    first = sum(map(math.prod, zip(starts, windows.strides_of(buffer.data.shape), strict=True)))
    if not 0 <= first < buffer.data.size:
        nothing = np.unravel_index(np.arange(0), whole)
        why = f"it begins at {tuple(map(int, starts))}, outside of the array, and is dropped"
        return Taken(_InARow(buffer, 0, 0), (whole, nothing), math.prod(whole), why)
    count = min(math.prod(whole), buffer.data.size - first)
    order = np.unravel_index(np.arange(count), whole)
    why = "a contiguous window is copied in one go, past the edge that it reaches over"
    return Taken(_InARow(buffer, first, count), (whole, order), count - inside, why)


def check_promise(mode: Any, overhang: tuple | None) -> str | None:
    """What is wrong with a load that promises to stay in bounds; None if nothing is."""
    if overhang is None or getattr(mode, "name", "") != "PROMISE_IN_BOUNDS":
        return None
    return (
        "a copy with oob_mode=PROMISE_IN_BOUNDS reaches over an edge of its array; what it reads"
        " there is whatever comes after"
    )
