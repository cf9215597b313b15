"""Where copies may begin: the copy engine takes no address that is not aligned.

From the CUDA programming guide, of bulk copies on GPUs of compute capability 9.0: a copy by a
descriptor has its part of shared memory begin at a multiple of 128 bytes; a flat one, which Mosaic
GPU makes of a window that is contiguous in global memory and need not be cut off, has both parts
begin at multiples of 16 bytes, and takes a multiple of 16. Buffers themselves are aligned.

The guide does not say so, but a copy by a descriptor begins at a multiple of 16 bytes of global
memory, too: at 8 of 16 an H200 reports an illegal instruction.

Tiles and swizzles are not modelled, so a part of shared memory is looked at only where they cannot
move it: where it is contiguous.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from stretto.distributed.simulator.state.arithmetic import bit_width
from stretto.distributed.simulator.state.memory import Buffer, Region

BY_DESCRIPTOR = 128
FLAT = 16
IN_GLOBAL = 16  # by a descriptor or flat


def misalignments(shared: Region, window: Region, *, may_be_flat: bool) -> Iterator[str]:
    """What is not aligned in a copy between `shared` and a `window` of global memory, in words.

    Args:
      shared, window: what is copied.
      may_be_flat: Mosaic GPU makes one flat copy of the window if that is contiguous.
    """
    is_flat = may_be_flat and window.get().flags.c_contiguous
    need = FLAT if is_flat else BY_DESCRIPTOR
    first = _first_byte(shared)
    if first is not None and first % need:
        yield _sentence(shared.buffer, first, need)
    first = _offset(window)
    if first is not None and first % IN_GLOBAL:
        yield _sentence(window.buffer, first, IN_GLOBAL)
    if not is_flat:
        return
    size = _bytes(window.buffer, window.get().size)
    if size % FLAT:
        where = window.buffer.describe()
        yield f"{size} bytes of {where} are copied, which is no multiple of {FLAT}"


def _sentence(buffer: Buffer, first: int, need: int) -> str:
    return f"it begins {first} bytes into {buffer.describe()}, which is no multiple of {need}"


def _first_byte(region: Region) -> int | None:
    """How far into its buffer a region begins; None if it is empty or not contiguous."""
    return _offset(region) if region.get().flags.c_contiguous else None


def _offset(region: Region) -> int | None:
    """How far into its buffer a region begins; None if it is empty."""
    view, whole = region.get(), region.buffer.data
    if not view.size or not np.may_share_memory(view, whole):
        return None
    return _bytes(region.buffer, (view.ctypes.data - whole.ctypes.data) // whole.itemsize)


def _bytes(buffer: Buffer, elements: int) -> int:
    return elements * bit_width(buffer.data.dtype) // 8
