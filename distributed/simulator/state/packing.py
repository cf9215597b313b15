"""Elements below a byte, as memory has them: several to a byte, the first in the lowest bits."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from stretto.distributed.simulator.state.arithmetic import bit_width, is_float


def is_packed(dtype: Any) -> bool:
    """Whether several elements share a byte."""
    return bit_width(dtype) < 8


def unpack(data: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The elements in `data`, an array of bytes: `8 / bits` times as many, as a copy."""
    bits = bit_width(dtype)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    codes = (data.view(np.uint8)[:, None] >> shifts & np.uint8((1 << bits) - 1)).reshape(-1)
    if is_float(dtype):
        return codes.view(dtype)
    if jnp.issubdtype(dtype, jnp.signedinteger):
        spare = 8 - bits
        codes = (codes << spare).view(np.int8) >> spare
    return codes.astype(dtype)


def pack(elements: np.ndarray) -> np.ndarray:
    """The bytes that hold `elements`, of which there is a whole number of bytes."""
    bits = bit_width(elements.dtype)
    codes = elements.view(np.uint8) if is_float(elements.dtype) else elements.astype(np.int8)
    codes = codes.view(np.uint8).reshape(-1, 8 // bits) & np.uint8((1 << bits) - 1)
    return np.bitwise_or.reduce(codes << np.arange(0, 8, bits, dtype=np.uint8), axis=1)


class PackedView:
    """The step from a union's bytes to the elements of one of its refs, for `Region`.

    Args:
      dtype: of the elements, below a byte.
      shape: of the ref.
      offset: its first byte in the union.
      cells_per_byte: marks that the union keeps of each byte.
    """

    def __init__(self, dtype: np.dtype, shape: tuple[int, ...], offset: int, cells_per_byte: int):
        self.dtype = dtype
        self.shape = shape
        self._cells = slice(offset * cells_per_byte, None)
        self._cells_per_element = cells_per_byte * bit_width(dtype) // 8
        size = int(np.prod(shape)) * bit_width(dtype) // 8
        self._bytes = slice(offset, offset + size)

    def __call__(self, array: np.ndarray, bookkeeping: bool) -> np.ndarray:
        """The marks as a view of `array`, or the elements, which are a copy."""
        if bookkeeping:
            cells = array[self._cells][: int(np.prod(self.shape)) * self._cells_per_element]
            return cells.reshape((*self.shape, self._cells_per_element))
        return unpack(array[self._bytes], self.dtype).reshape(self.shape)

    def write_back(self, array: np.ndarray, elements: np.ndarray) -> None:
        """Puts the elements that this step gave, and that have been changed, into `array`."""
        array[self._bytes] = pack(elements).view(array.dtype)
