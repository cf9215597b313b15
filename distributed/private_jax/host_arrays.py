"""Arrays in the memory of a CPU program, by their addresses."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class HostArray:
    """How an array lies in memory: dense and row-major.

    XLA packs elements of two and four bits, the first in the lowest; numpy gives each a byte.
    """

    shape: tuple[int, ...]
    dtype: Any

    def read(self, address: int) -> np.ndarray:
        """The array at `address`: the memory itself, or a copy where the elements are packed."""
        memory, bits = self._memory(address), self._bits
        if bits == 8:
            memory.flags.writeable = False
            return memory.view(self.dtype).reshape(self.shape)
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        values = ((memory[:, None] >> shifts) & (2**bits - 1)).reshape(-1)[: math.prod(self.shape)]
        if jnp.issubdtype(self.dtype, jnp.signedinteger):
            values = (values ^ 2 ** (bits - 1)).astype(np.int8) - np.int8(2 ** (bits - 1))
        return values.view(self.dtype).reshape(self.shape)

    def write(self, address: int, value: Any) -> None:
        """Puts `value` at `address`.

        Raises:
          ValueError: it has another shape or type.
        """
        value = np.asarray(value, order="C")  # Unlike ascontiguousarray, it leaves rank 0 alone.
        if value.shape != tuple(self.shape) or value.dtype != np.dtype(self.dtype):
            raise ValueError(
                f"a result of shape {value.shape} and type {value.dtype} stands where the program"
                f" expects {tuple(self.shape)} and {np.dtype(self.dtype)}."
            )
        memory, bits = self._memory(address), self._bits
        flat = value.reshape(-1).view(np.uint8)
        if bits == 8:
            memory[:] = flat
            return
        padded = np.zeros((len(memory), 8 // bits), np.uint8)
        padded.reshape(-1)[: len(flat)] = flat & (2**bits - 1)
        memory[:] = np.bitwise_or.reduce(padded << np.arange(0, 8, bits, dtype=np.uint8), axis=1)

    @property
    def _bits(self) -> int:
        """Bits of an element that is smaller than a byte, else 8."""
        if self.dtype == np.bool_:
            return 8
        about = jnp.iinfo if jnp.issubdtype(self.dtype, jnp.integer) else jnp.finfo
        return min(about(self.dtype).bits, 8)

    def _memory(self, address: int) -> np.ndarray:
        size = math.prod(self.shape) * np.dtype(self.dtype).itemsize
        if self._bits < 8:
            size = -(-size * self._bits // 8)
        if not size:
            return np.zeros(0, np.uint8)
        return np.frombuffer((ctypes.c_uint8 * size).from_address(address), np.uint8)
