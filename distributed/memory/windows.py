"""How Mosaic GPU copies a window of global memory.

The copy engine cuts a window off at the edges of its array: what it would store past them is
dropped, what it would load is zeros. There are two exceptions, both where the window is prepared
(`launch_context.py` of Mosaic GPU; read on JAX 0.11.2 and 0.12.0.1, seen on H100s and H200s):

- A store out of shared memory that is not swizzled, of a window that is contiguous in its array,
  is one flat copy of as many bytes. It stops at the end of the whole array only: at any other
  edge it continues into the next row or part. Whether a window is contiguous is judged by
  its size and the array's strides, so one that is larger than its array may pass for it. Loads are
  never made so, unless they promise to stay in bounds; nor are stores that reduce.
- An index along a dimension of one element, or of one tile, is ignored.

How shared memory is laid out is what its transforms say; a layout that the compiler finds by itself
is not known here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Extent:
    """A window along one dimension: from `start` on, None if that is known in the kernel only.

    `squeezed` says that the window does not have the dimension: it was given one index.
    """

    start: int | None
    size: int
    squeezed: bool = False


type Window = Sequence[Extent]


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the window lies in shared memory.

    Attributes:
      tiling: sizes of the tiles along the last dimensions; none by default.
      rearranged: swizzled or transposed, which no flat copy can do.
    """

    tiling: tuple[int, ...] = ()
    rearranged: bool = False

    @classmethod
    def of(cls, transforms: Iterable[Any] | None) -> Layout:
        """The layout of a ref with these transforms, as a kernel's jaxpr has them."""
        tiling, rearranged = (), False
        for transform in transforms or ():
            name = type(transform).__name__
            if name == "UntilingTransform":
                tiling = tuple(transform.tiling)
            rearranged |= name in ("UnswizzleRef", "TransposeTransform")
        return cls(tiling, rearranged)


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Distances between neighbours along each dimension, in elements."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def is_flat(shape: Sequence[int], window: Window, layout: Layout) -> bool:
    """Whether a store of `window` of an array of `shape` is one flat copy."""
    if layout.rearranged:
        return False
    sizes_and_strides = list(_as_copied(shape, window, layout))
    expected = 1
    for size, stride in reversed(sizes_and_strides):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return bool(sizes_and_strides) and sizes_and_strides[-1][1] == 1


def _kept_and_tiled(window: Window, layout: Layout) -> tuple[list[int], dict[int, int]]:
    """The dimensions that the window has, and the tiles' sizes along the last of them."""
    kept = [dim for dim, extent in enumerate(window) if not extent.squeezed]
    return kept, dict(zip(kept[len(kept) - len(layout.tiling) :], layout.tiling, strict=True))


def _as_copied(shape: Sequence[int], window: Window, layout: Layout) -> Iterator[tuple[int, int]]:
    """(size, stride) of the window along each dimension that is left of it, tiles apart.

    Squeezed dimensions come first; those in which neither array nor window has more than one are
    dropped.
    """
    strides = strides_of(shape)
    kept, tiled = _kept_and_tiled(window, layout)
    dims = [dim for dim, extent in enumerate(window) if extent.squeezed]
    dims += [dim for dim in kept if dim not in tiled]
    for dim in dims:
        if (shape[dim], window[dim].size) != (1, 1):
            yield window[dim].size, strides[dim]
    for dim, tile in tiled.items():
        tile_in_array = min(tile, shape[dim])
        if (shape[dim] // tile_in_array, window[dim].size // tile) != (1, 1):
            yield window[dim].size // tile, tile_in_array * strides[dim]
    for dim, tile in tiled.items():
        tile_in_array = min(tile, shape[dim])
        if (tile_in_array, tile) != (1, 1):
            yield tile, strides[dim]


def with_ignored_starts(
    shape: Sequence[int], starts: Sequence[int], window: Window, layout: Layout
) -> tuple[int, ...]:
    """Where along each dimension the copy begins, for the `starts` that the window is given."""
    kept, tiled = _kept_and_tiled(window, layout)
    found = list(starts)
    for dim in kept:
        tile = tiled.get(dim, 1)
        if shape[dim] <= tile == window[dim].size:
            found[dim] %= tile
    return tuple(found)


def edge_that_is_run_over(shape: Sequence[int], window: Window, layout: Layout) -> int | None:
    """The dimension at whose end a store of `window` may run on in its array; None if none is.

    A start that is known in the kernel only is taken for a multiple of the window's size.
    """
    if not is_flat(shape, window, layout):
        return None
    for dim, (size, extent) in enumerate(zip(shape, window, strict=True)):
        is_last = math.prod(shape[:dim]) == 1  # Past its end there is no more of the array.
        if not is_last and not _fits(size, extent):
            return dim
    return None


def _fits(size: int, extent: Extent) -> bool:
    if extent.start is None:
        return size % extent.size == 0
    return 0 <= extent.start <= size - extent.size
