"""What scopes allocate: shared memory, barriers, semaphores, registers."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from stretto.distributed.simulator.reports.errors import UnsupportedKernelError
from stretto.distributed.simulator.state.arithmetic import bit_width
from stretto.distributed.simulator.state.barriers import BarrierArray
from stretto.distributed.simulator.state.memory import Buffer, poison

_COLUMN_ALIGNMENT = 4
"""Columns of tensor memory that an allocation takes a multiple of (`TMEM_COL_ALIGNMENT`)."""

SMEM_ALIGNMENT = 1024
"""Buffers in shared memory start at multiples of so many bytes (`SMEM_ALIGNMENT` of Pallas)."""

_WHY_NOT = {
    "gmem": " of anything but semaphores, which Mosaic GPU refuses; return it as one more result",
}


@dataclass(frozen=True)
class Allocation:
    """One thing that a scope allocates.

    Attributes:
      kind: "shared", "union", "tensor", "barrier", "semaphore" or "registers".
      name: what reports call it.
      shape: logical shape (bytes of a union).
      dtype: of the elements; None for barriers and semaphores.
      arrivals: of a barrier.
      cluster_axes, to_leader: of a cluster barrier.
      orders_tensor_core: of a barrier.
      cells_per_byte: of a union (`Buffer.cells_per_byte`).
      columns: of tensor memory.
    """

    kind: str
    name: str
    shape: tuple[int, ...]
    dtype: Any = None
    arrivals: int = 0
    cluster_axes: tuple = ()
    to_leader: bool = False
    orders_tensor_core: bool = False
    cells_per_byte: int = 1
    columns: int = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of a buffer in shared memory; 0 for anything else."""
        if self.kind not in ("shared", "union"):
            return 0
        return math.prod(self.shape) * bit_width(self.dtype) // 8

    @property
    def pool(self) -> tuple:
        """What it takes a part of: scopes at the same place get the same part, as it was left."""
        if self.kind == "barrier":
            count = math.prod(self.shape)
            how = self.cluster_axes, self.to_leader, self.orders_tensor_core
            return "barrier", count, self.arrivals, *how
        return ("tmem",) if self.kind == "tensor" else ("smem",)

    @property
    def room(self) -> int:
        """How much of its pool it takes: bytes, columns, or one group of barriers."""
        if self.kind == "barrier":
            return 1
        return self.columns or -(-self.num_bytes // SMEM_ALIGNMENT) * SMEM_ALIGNMENT

    def describe(self) -> str:
        """The buffer in words."""
        shape = "x".join(map(str, self.shape)) or "one"
        return f"{self.name} ({shape} {'bytes' if self.kind == 'union' else self.dtype})"


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
        return Allocation(
            "barrier", name, aval.shape, None, dtype.num_arrivals,
            orders_tensor_core=dtype.orders_tensor_core,
        )  # fmt: skip
    if type(dtype).__name__ == "ClusterBarrierType":
        axes = tuple(dtype.collective_axes)
        to_leader = getattr(dtype, "leader_tracked", False)
        return Allocation(
            "barrier", name, aval.shape, None, dtype.num_arrivals, axes, to_leader,
            dtype.orders_tensor_core,
        )  # fmt: skip
    space = str(aval.memory_space)
    columns = _columns(aval) if space == "tmem" else 0
    for transform in transforms:
        aval = transform.transform_type(aval)
    if space == "smem":
        return Allocation("shared", name, aval.shape, np.dtype(dtype))
    if space == "tmem":
        return Allocation("tensor", name, aval.shape, np.dtype(dtype), columns=columns)
    if space == "regs":
        return Allocation("registers", name, aval.shape, np.dtype(dtype))
    raise UnsupportedKernelError(f"an allocation in memory space {space}{_WHY_NOT.get(space, '')}")


def _columns(aval: Any) -> int:
    """Columns of tensor memory that a ref takes, by its shape there."""
    columns = aval.layout.cols_in_shape(aval.shape, bit_width(aval.dtype))
    return -(-columns // _COLUMN_ALIGNMENT) * _COLUMN_ALIGNMENT


def _union(aval: Any, name: str) -> Allocation:
    """Room for several refs in turn, with a mark for each element of the smallest type."""
    if str(aval.memory_space) != "smem":
        raise UnsupportedKernelError(
            f"a union in memory space {aval.memory_space}; allocate its refs one by one, if there"
            " is room for them"
        )
    bits = min((bit_width(ref.dtype) for ref in jax.tree.leaves(aval.refs)), default=8)
    cells = max(8 // bits, 1)
    return Allocation("union", name, aval.shape, np.int8, cells_per_byte=cells)


def allocations_of(eqn: Any) -> list[Allocation]:
    """What a `run_scoped` allocates, in the order of its body's arguments."""
    variables = eqn.params["jaxpr"].invars
    transforms = eqn.params.get("ref_transforms") or ((),) * len(variables)
    names = _names(eqn.params["jaxpr"])
    return [
        allocation_of(v.aval, t, n) for v, t, n in zip(variables, transforms, names, strict=True)
    ]


def _names(jaxpr: Any) -> list[str]:
    """What the function that a jaxpr was made of calls its arguments."""
    count = len(jaxpr.invars)
    names = getattr(jaxpr.debug_info, "arg_names", None) or ()
    names = [n for n in names if n is not None]
    if len(names) != count:
        return [f"scratch {i}" for i in range(count)]
    # "kwargs['name']" is what JAX calls a body's parameter that it does not find in its signature,
    # which `stretto.distributed.kernel` gives more than JAX passes.
    names = [re.sub(r"^\w+\['(\w+)'\]", r"\1", str(n)) for n in names]
    return [n.split(".")[-1].split("[")[0] if count == 1 else n for n in names]


def make_shared(machine: Any, block: Any, spec: Allocation, key: Any, start: int) -> Any:
    """Makes a shared allocation of `block`: a buffer that begins at `start`, or barriers."""
    if spec.kind == "barrier":
        expected, axes = spec.arrivals, spec.cluster_axes
        if axes:
            expected *= len(machine.cluster_neighbours(block, axes))
        return BarrierArray(
            spec.name, spec.shape, expected, machine.scheduler, key, axes, spec.to_leader,
            spec.orders_tensor_core,
        )  # fmt: skip
    space = "tmem" if spec.kind == "tensor" else "smem"
    return Buffer(
        poison(spec.shape, spec.dtype), name=spec.name, space=space, device=block.device.index,
        block=block.index, key=key, written=False, cells_per_byte=spec.cells_per_byte, start=start,
    )  # fmt: skip


def like(machine: Any, block: Any, ref: Any) -> Any:
    """For `block`, the same allocation as `ref` is for another block of its cluster."""
    if isinstance(ref, BarrierArray):
        expected = ref.items[0].expected
        name = ref.ids.name
        return BarrierArray(
            name, ref.ids.data.shape, expected, machine.scheduler, ref.key, ref.cluster_axes,
            ref.to_leader, ref.orders_tensor_core,
        )  # fmt: skip
    return Buffer(
        poison(ref.data.shape, ref.data.dtype), name=ref.name, space=ref.space,
        device=block.device.index, block=block.index, key=ref.key, written=False,
        cells_per_byte=ref.cells_per_byte, start=ref.start,
    )  # fmt: skip


def shared_bytes(allocation: Any) -> int:
    """Shared memory that a buffer or barriers take."""
    if isinstance(allocation, BarrierArray):
        return 8 * len(allocation.items)
    if allocation.space == "tmem":
        return 0
    return allocation.data.size * bit_width(allocation.data.dtype) // 8
