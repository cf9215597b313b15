"""What scopes allocate: shared memory, barriers, semaphores, registers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from stretto.distributed.simulator.arithmetic import bit_width
from stretto.distributed.simulator.barriers import BarrierArray
from stretto.distributed.simulator.errors import UnsupportedKernelError
from stretto.distributed.simulator.memory import Buffer, poison

_WHY_NOT = {
    "tmem": ", which is Blackwell's, and the simulator is of Hopper",
    "gmem": " of anything but semaphores, which Mosaic GPU refuses; return it as one more result",
}


@dataclass(frozen=True)
class Allocation:
    """One thing that a scope allocates.

    Attributes:
      kind: "shared", "union", "barrier", "semaphore" or "registers".
      name: what reports call it.
      shape: logical shape (bytes of a union).
      dtype: of the elements; None for barriers and semaphores.
      arrivals: of a barrier.
      cluster_axes: of a cluster barrier.
      cells_per_byte: of a union (`Buffer.cells_per_byte`).
    """

    kind: str
    name: str
    shape: tuple[int, ...]
    dtype: Any = None
    arrivals: int = 0
    cluster_axes: tuple = ()
    cells_per_byte: int = 1


def is_semaphore(aval: Any) -> bool:
    """Whether a ref's abstract value is of semaphores."""
    return type(aval.dtype).__name__ in ("Semaphore", "BarrierSemaphore")


def allocation_of(aval: Any, transforms: tuple, name: str) -> Allocation:
    """What an abstract ref of a scope allocates."""
    kind = type(aval).__name__
    if kind == "WGMMAAbstractAccumulatorRef":
        return Allocation("registers", name, aval.shape, aval.dtype)
    if kind == "AbstractRefUnion":
        return _union(aval, name)
    if is_semaphore(aval):
        return Allocation("semaphore", name, aval.shape)
    dtype = aval.dtype
    if type(dtype).__name__ == "BarrierType":
        return Allocation("barrier", name, aval.shape, None, dtype.num_arrivals)
    if type(dtype).__name__ == "ClusterBarrierType":
        axes = tuple(dtype.collective_axes)
        return Allocation("barrier", name, aval.shape, None, dtype.num_arrivals, axes)
    space = str(aval.memory_space)
    for transform in transforms:
        aval = transform.transform_type(aval)
    if space == "smem":
        return Allocation("shared", name, aval.shape, np.dtype(dtype))
    if space == "regs":
        return Allocation("registers", name, aval.shape, np.dtype(dtype))
    raise UnsupportedKernelError(f"an allocation in memory space {space}{_WHY_NOT.get(space, '')}")


def _union(aval: Any, name: str) -> Allocation:
    """Room for several refs in turn, with a mark for each element of the smallest type."""
    if str(aval.memory_space) != "smem":
        space = str(aval.memory_space)
        raise UnsupportedKernelError(f"a union in memory space {space}{_WHY_NOT.get(space, '')}")
    bits = min((bit_width(ref.dtype) for ref in jax.tree.leaves(aval.refs)), default=8)
    cells = max(8 // bits, 1)
    return Allocation("union", name, aval.shape, np.int8, cells_per_byte=cells)


def make_shared(machine: Any, block: Any, spec: Allocation, key: Any) -> Any:
    """Makes a shared allocation of `block`: a buffer or barriers."""
    if spec.kind == "barrier":
        expected, axes = spec.arrivals, spec.cluster_axes
        if axes:
            expected *= len(machine.cluster_blocks(block, axes))
        return BarrierArray(spec.name, spec.shape, expected, machine.scheduler, key, axes)
    return Buffer(
        poison(spec.shape, spec.dtype), name=spec.name, space="smem", device=block.device.index,
        block=block.index, key=key, written=False, cells_per_byte=spec.cells_per_byte,
    )  # fmt: skip


def like(machine: Any, block: Any, ref: Any) -> Any:
    """For `block`, the same allocation as `ref` is for another block of its cluster."""
    if isinstance(ref, BarrierArray):
        expected = ref.items[0].expected
        name = ref.ids.name
        return BarrierArray(
            name, ref.ids.data.shape, expected, machine.scheduler, ref.key, ref.cluster_axes
        )
    return Buffer(
        poison(ref.data.shape, ref.data.dtype), name=ref.name, space="smem",
        device=block.device.index, block=block.index, key=ref.key, written=False,
        cells_per_byte=ref.cells_per_byte,
    )  # fmt: skip


def shared_bytes(allocation: Any) -> int:
    """Shared memory that a buffer or barriers take."""
    if isinstance(allocation, BarrierArray):
        return 8 * len(allocation.items)
    return allocation.data.size * bit_width(allocation.data.dtype) // 8
