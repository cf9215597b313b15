"""Refs of a union that lie in memory tile by tile, where another ref of it does not."""

from __future__ import annotations

import functools

import numpy as np


class TiledView:
    """The step from a union's bytes to a ref of it whose elements lie in tiles, for `Region`.

    Elsewhere the simulator leaves tiles alone. Here they decide which bytes the refs share.

    Args:
      dtype: of the elements.
      shape: of the ref, as a kernel sees it.
      offset: its first byte in the union.
      cells_per_byte: marks that the union keeps of each byte.
      tiling: sizes of the tiles along the last dimensions.
    """

    def __init__(
        self,
        dtype: np.dtype,
        shape: tuple[int, ...],
        offset: int,
        cells_per_byte: int,
        tiling: tuple[int, ...],
    ):
        size = int(np.prod(shape)) * dtype.itemsize
        self._dtype = dtype
        self._bytes = slice(offset, offset + size)
        self._cells = slice(offset * cells_per_byte, (offset + size) * cells_per_byte)
        self._cells_per_element = dtype.itemsize * cells_per_byte
        self.order = order_of(shape, tiling)

    def flat(self, array: np.ndarray, bookkeeping: bool) -> np.ndarray:
        """The elements in the order of memory, or their marks `[elements, marks]`, as a view."""
        if bookkeeping:
            return array[self._cells].reshape(-1, self._cells_per_element)
        return array[self._bytes].view(self._dtype)


@functools.lru_cache(maxsize=64)
def order_of(shape: tuple[int, ...], tiling: tuple[int, ...]) -> np.ndarray:
    """Of each element of an array of `shape` its place in memory, where it lies in tiles."""
    first, rank = len(shape) - len(tiling), len(tiling)
    tiles = (n // t for n, t in zip(shape[first:], tiling, strict=True))
    places = np.arange(np.prod(shape)).reshape((*shape[:first], *tiles, *tiling))
    pairs = (first + dim + half for dim in range(rank) for half in (0, rank))
    return places.transpose((*range(first), *pairs)).reshape(shape)
